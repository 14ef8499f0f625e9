package join_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

func TestDeregisterByForceSaysAtOnceThatTheHubHasStopped(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "stopped")
	request := pullRequest(n, "c")
	request.Shard = n
	registered(t, plane, request)
	cluster := clusterNamed(t, hubClient, n, "c")
	hold := []byte(`{"metadata":{"finalizers":["` + kube.FinalizerCluster + `"]}}`)
	if err := hubClient.Patch(t.Context(), cluster, client.RawPatch(types.MergePatchType, hold)); err != nil {
		t.Fatal(err)
	}
	if err := hubClient.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.AgentNamespace}}); client.IgnoreAlreadyExists(err) != nil {
		t.Fatal(err)
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: "towline-hub-" + n}}
	lease.Spec = coordinationv1.LeaseSpec{LeaseDurationSeconds: ptr.To[int32](8), RenewTime: &metav1.MicroTime{Time: time.Now().Add(-time.Minute)}}
	if err := hubClient.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	r := join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}, Force: true, Wait: -1}
	_, err := join.Deregister(t.Context(), plane.Config, r)
	wantText(t, err, "no hub has taken it up: is the hub of shard "+n+" running?")
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
}

func TestDeregisterThatIsRefusedLeavesNoOrder(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "refused")
	registered(t, plane, pullRequest(n, "c"))
	for name, spares := range map[string]string{"at once": "nothing", "after the trial": "dryRun=All"} {
		refusing := rest.CopyConfig(plane.Config)
		refusing.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(request *http.Request) (*http.Response, error) {
				if request.Method != http.MethodDelete {
					return next.RoundTrip(request)
				}
				body, err := io.ReadAll(request.Body)
				if err != nil {
					return nil, err
				}
				request.Body = io.NopCloser(bytes.NewReader(body))
				if spares == "dryRun=All" && strings.Contains(request.URL.RawQuery+string(body), "dryRun") {
					return next.RoundTrip(request)
				}
				return nil, errors.New("you may not")
			})
		})
		r := join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}, KeepAddons: true, Force: true, Wait: -1}
		_, err := join.Deregister(t.Context(), refusing, r)
		wantText(t, err, "you may not")
		if cluster := clusterNamed(t, hubClient, n, "c"); cluster.Annotations[kube.AnnotationDeregister] != "" || !cluster.DeletionTimestamp.IsZero() {
			t.Errorf("%s: the cluster has annotations %v", name, cluster.Annotations)
		}
	}
}
