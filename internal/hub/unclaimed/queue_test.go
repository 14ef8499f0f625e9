package unclaimed_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/hub/unclaimed"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/test/controllers"
)

// stallingMembers is a transport whose members in the namespace stalling do not answer.
type stallingMembers struct {
	deliver.Transport
	stalling string
	stalled  controllers.Concurrency
	others   atomic.Int32
}

func (s *stallingMembers) ListDeployed(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error) {
	if m.Namespace != s.stalling {
		s.others.Add(1)
		return nil, nil
	}
	defer s.stalled.Begin()()
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestUnclaimedBundlesOfOtherNamespaces has stalling push members of one namespace, more than are read concurrently.
// The bundles of members of another namespace are read meanwhile.
func TestUnclaimedBundlesOfOtherNamespaces(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	if err := hub.InstallCRDs(t.Context(), plane.Config); err != nil {
		t.Fatal(err)
	}
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	stalling, other := plane.Namespace(t, "stalling"), plane.Namespace(t, "other")
	members := &stallingMembers{stalling: stalling}
	controllers.Start(t, plane.Config, func(ctx context.Context, mgr ctrl.Manager) error {
		controller := &unclaimed.Controller{
			Hub: mgr.GetClient(), Live: mgr.GetAPIReader(), Transport: members, Events: events.NewFakeRecorder(1000),
		}
		err := mgr.GetFieldIndexer().IndexField(ctx, &configv1beta1.ClusterSummary{}, summaries.ClusterIndex, func(obj client.Object) []string {
			return []string{match.MemberID(obj.(*configv1beta1.ClusterSummary)).String()}
		})
		return errors.Join(err, controller.Setup(ctx, mgr))
	}, stalling, other)
	create := func(namespace, name string) {
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Finalizers: []string{kube.FinalizerCluster}}}
		err := hubClient.Create(t.Context(), cluster)
		if err == nil {
			err = hubClient.Status().Patch(t.Context(), cluster, client.RawPatch("application/merge-patch+json", []byte(`{"status":{"ready":true}}`)))
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
			if err := client.IgnoreNotFound(hubClient.Patch(context.WithoutCancel(t.Context()), cluster, patch)); err != nil {
				t.Error(err)
			}
		})
	}
	eventually := func(what string, within time.Duration, is func() bool) {
		t.Helper()
		err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, within, true, func(context.Context) (bool, error) { return is(), nil })
		if err != nil {
			t.Fatalf("%s: %v; %d members stall", what, err, members.stalled.Running())
		}
	}
	for i := range 60 {
		create(stalling, fmt.Sprint("stalling-", i))
	}
	eventually("all workers of the namespace are taken", 30*time.Second, func() bool { return members.stalled.Running() >= 40 })
	for i := range 3 {
		create(other, fmt.Sprint("other-", i))
	}
	// Those that stall keep their workers for a minute.
	eventually("the bundles of the other namespace are read", 20*time.Second, func() bool { return members.others.Load() >= 3 })
	if got := members.stalled.Most(); got > 40 {
		t.Errorf("%d members of one namespace were read at once, want 40", got)
	}
}
