package summaries

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/status"
)

// TestQuickDeliveryIsOneStatusWrite delivers bundles to a pull member. The status shows a delivery that has not ended
// after two seconds. A delivery that ends earlier is one write.
func TestQuickDeliveryIsOneStatusWrite(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakePassiveClock(time.Now())
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "profile-one"}}
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithObjects(summary).WithStatusSubresource(summary).Build()
	c := &Controller{Hub: hub, Events: events.NewFakeRecorder(10), Clock: clock, normalEvents: newEventLimiter()}
	writes, version := 0, ""
	// reconcile reports the state of a bundle and returns the delay of the next reconcile.
	reconcile := func(mode fleet.Mode, syncMode configv1beta1.SyncMode, digest byte, reported bundle.State) time.Duration {
		t.Helper()
		if err := hub.Get(t.Context(), client.ObjectKeyFromObject(summary), summary); err != nil {
			t.Fatal(err)
		}
		summary.Spec.ClusterProfileSpec.SyncMode = syncMode
		s := newState(summary, nil, fleet.Member{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one", Mode: mode})
		s.addResult(status.FeatureResult{
			Feature: libv1beta1.FeatureResources, Kind: status.Delivered, DesiredDigest: bundle.Digest{digest},
			Report: bundle.Report{State: reported, Digest: bundle.Digest{digest}, Message: map[bundle.State]string{bundle.StateFailed: "no room"}[reported]},
		})
		if err := c.report(t.Context(), s, phase.Outcome{Kind: phase.Done}); err != nil {
			t.Fatal(err)
		}
		if s.summary.ResourceVersion != version {
			writes, version = writes+1, s.summary.ResourceVersion
		}
		return s.recheckAfter
	}
	want := func(step string, wantWrites int, wantStatus libv1beta1.FeatureStatus, delay, wantDelay time.Duration) {
		t.Helper()
		written := &configv1beta1.ClusterSummary{}
		if err := hub.Get(t.Context(), client.ObjectKeyFromObject(summary), written); err != nil {
			t.Fatal(err)
		}
		if got := status.FeatureOf(written.Status, libv1beta1.FeatureResources).Status; writes != wantWrites || got != wantStatus || delay != wantDelay {
			t.Errorf("%s: got %d writes, status %q and delay %s, want %d, %q and %s", step, writes, got, delay, wantWrites, wantStatus, wantDelay)
		}
		writes = 0
	}
	const continuous = configv1beta1.SyncModeContinuous
	reconcile(fleet.Pull, continuous, 1, bundle.StateApplied)
	want("first", 1, libv1beta1.FeatureStatusProvisioned, 0, 0)

	delay := reconcile(fleet.Pull, continuous, 2, bundle.StatePending)
	want("a change begins", 0, libv1beta1.FeatureStatusProvisioned, delay, startDelay)
	clock.SetTime(clock.Now().Add(time.Second))
	delay = reconcile(fleet.Pull, continuous, 2, bundle.StatePending)
	want("a second later", 0, libv1beta1.FeatureStatusProvisioned, delay, time.Second)
	reconcile(fleet.Pull, continuous, 2, bundle.StateApplied)
	want("it is applied", 1, libv1beta1.FeatureStatusProvisioned, 0, 0)

	reconcile(fleet.Pull, continuous, 3, bundle.StatePending)
	clock.SetTime(clock.Now().Add(startDelay))
	delay = reconcile(fleet.Pull, continuous, 3, bundle.StatePending)
	want("it takes long", 1, libv1beta1.FeatureStatusProvisioning, delay, 0)
	reconcile(fleet.Pull, continuous, 3, bundle.StateFailed)
	want("it fails", 1, libv1beta1.FeatureStatusFailed, 0, 0)

	reconcile(fleet.Pull, configv1beta1.SyncModeOneTime, 4, bundle.StatePending)
	want("mode OneTime", 1, libv1beta1.FeatureStatusProvisioning, 0, 0)
	reconcile(fleet.Push, continuous, 5, bundle.StateApplied)
	reconcile(fleet.Push, continuous, 6, bundle.StatePending)
	want("a push member", 2, libv1beta1.FeatureStatusProvisioning, 0, 0)
}

// TestNormalEventsAreLimited records many events in one second. Warnings are never dropped.
func TestNormalEventsAreLimited(t *testing.T) {
	t.Parallel()
	clock, recorder := testclock.NewFakePassiveClock(time.Now()), events.NewFakeRecorder(1000)
	c := &Controller{Events: recorder, Clock: clock, normalEvents: newEventLimiter()}
	record := func(kind string, count, want int) {
		t.Helper()
		before := len(recorder.Events)
		for range count {
			c.recordEvent(&configv1beta1.ClusterSummary{}, status.Event{Type: kind, Reason: "Sveltos"})
		}
		if got := len(recorder.Events) - before; got != want {
			t.Errorf("%d events of type %s: got %d, want %d", count, kind, got, want)
		}
	}
	record("Normal", 2*normalEventsBurst, normalEventsBurst)
	record("Warning", 200, 200)
	clock.SetTime(clock.Now().Add(time.Second))
	record("Normal", 2*normalEventsBurst, normalEventsPerSecond)
}
