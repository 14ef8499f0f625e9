package clusters_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/clusters"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// unanswered is more push members than are contacted at once.
const unanswered = 120

func TestSilenceIsNoticedWhileManyMembersDoNotAnswer(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	namespace := plane.Namespace(t, "queues")
	mgr, err := ctrl.NewManager(plane.Config, ctrl.Options{
		Scheme: kube.Scheme(), Cache: cache.Options{DefaultNamespaces: map[string]cache.Config{namespace: {}}}, Metrics: server.Options{BindAddress: "0"},
	})
	if err != nil {
		t.Fatal(err)
	}
	hub, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	installCRD(t, hub)
	var dialled atomic.Int32
	controller := &clusters.Controller{
		Hub: mgr.GetClient(), Forget: func(string) {}, Events: events.NewFakeRecorder(1000), Clock: clock.RealClock{},
		Dial: func(ctx context.Context, _ fleet.Member) (*rest.Config, error) {
			dialled.Add(1)
			<-ctx.Done()
			return nil, ctx.Err()
		},
	}
	if err := controller.Setup(t.Context(), mgr); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- mgr.Start(t.Context()) }()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	for i := range unanswered {
		push := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint("push-", i)}}
		if err := hub.Create(t.Context(), push); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all workers are taken", func(context.Context) (bool, error) { return dialled.Load() >= 100, nil })
	silence(t, hub, namespace)
}

// silence makes a pull member whose agent was last heard of long ago, and waits until it is Down.
func silence(t *testing.T, hub client.Client, namespace string) {
	t.Helper()
	pull := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "pull"}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true}}
	old := &metav1.MicroTime{Time: time.Now().Add(-time.Hour)}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "pull"}, Spec: coordinationv1.LeaseSpec{RenewTime: old}}
	for _, obj := range []client.Object{lease, pull} {
		if err := hub.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	if err := hub.Status().Patch(t.Context(), pull, client.RawPatch("application/merge-patch+json", []byte(`{"status":{"ready":true}}`))); err != nil {
		t.Fatal(err)
	}
	from := time.Now()
	eventually(t, "the silent member is down", func(ctx context.Context) (bool, error) {
		err := hub.Get(ctx, client.ObjectKeyFromObject(pull), pull)
		return err == nil && pull.Status.ConnectionStatus == libv1beta1.ConnectionDown, err
	})
	// Those that do not answer keep their workers for ten seconds.
	if took := time.Since(from); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
}

func eventually(t *testing.T, what string, is wait.ConditionWithContextFunc) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 30*time.Second, true, is); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}
