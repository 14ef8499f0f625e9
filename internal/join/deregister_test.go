package join_test

import (
	"bytes"
	"context"
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

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
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

func TestDeregisterByForceIsAtOnceOnlyForASilentAgent(t *testing.T) {
	t.Parallel()
	const checks = `"agentCheckFailures":3,"agentCheckMessage":"liveness check c: no"`
	tests := map[string]struct {
		status  string
		deleted bool
		want    string
	}{
		"no report yet":              {status: `{}`},
		"down by checks":             {status: `{"ready":true,"connectionStatus":"Down","failureMessage":"liveness check c: no",` + checks + `}`},
		"down by checks, deleted":    {status: `{"ready":true,"connectionStatus":"Down","failureMessage":"deregistering: waiting for x",` + checks + `}`, deleted: true},
		"silent":                     {status: `{"ready":true,"connectionStatus":"Down","failureMessage":"` + libv1beta1.AgentReportTooOld + `"}`, want: kube.DeregisterForce},
		"silent with a failed check": {status: `{"connectionStatus":"Down","failureMessage":"` + libv1beta1.AgentReportTooOld + `",` + checks + `}`, want: kube.DeregisterForce},
		"silent, deleted":            {status: `{"connectionStatus":"Down","failureMessage":"deregistering: waiting for x"}`, deleted: true, want: kube.DeregisterForce},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plane, hubClient := hub(t)
			n := plane.Namespace(t, "force")
			registered(t, plane, pullRequest(n, "c"))
			hold := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["`+kube.FinalizerCluster+`"]}}`))
			beat := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"renewTime":"2026-01-02T12:00:00.000000Z"}}`))
			err := errors.Join(
				hubClient.Patch(t.Context(), clusterNamed(t, hubClient, n, "c"), hold),
				hubClient.Patch(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: "c"}}, beat),
			)
			if err != nil {
				t.Fatal(err)
			}
			patchStatus(t, hubClient, n, tc.status)
			if tc.deleted {
				if err := hubClient.Delete(t.Context(), clusterNamed(t, hubClient, n, "c")); err != nil {
					t.Fatal(err)
				}
			}
			// The watch begins after the deregistration has been requested. No hub is at work.
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			config := rest.CopyConfig(plane.Config)
			config.Wrap(func(next http.RoundTripper) http.RoundTripper {
				return roundTripper(func(request *http.Request) (*http.Response, error) {
					if request.URL.Query().Has("watch") {
						cancel()
					}
					return next.RoundTrip(request)
				})
			})
			r := join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}, Force: true}
			if _, err := join.Deregister(ctx, config, r); err == nil {
				t.Error("the deregistration has finished without a hub")
			}
			cluster := clusterNamed(t, hubClient, n, "c")
			if got := cluster.Annotations[kube.AnnotationDeregister]; got != tc.want || cluster.DeletionTimestamp.IsZero() {
				t.Errorf("annotation is %q, want %q; deleted %t", got, tc.want, !cluster.DeletionTimestamp.IsZero())
			}
		})
	}
}
