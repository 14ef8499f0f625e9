package agent_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/agent"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// newDuplicate returns another member with a manifest of the same registration.
func (w *world) newDuplicate() *world {
	w.t.Helper()
	other := &world{
		t: w.t, hub: w.hub, member: localkube.ForTest(w.t, localkube.Named("other")), hubClient: w.hubClient, transport: w.transport, cluster: w.cluster,
	}
	other.client = other.clientOf(other.member)
	other.register()
	return other
}

// memberID returns the UID of the member's namespace kube-system.
func (w *world) memberID() string {
	w.t.Helper()
	namespace := &corev1.Namespace{}
	if err := w.client.Get(w.t.Context(), client.ObjectKey{Name: metav1.NamespaceSystem}, namespace); err != nil {
		w.t.Fatal(err)
	}
	return string(namespace.UID)
}

// holdsLease returns an error unless this member holds the Lease.
func (w *world) holdsLease(ctx context.Context) error {
	lease, err := w.lease(ctx)
	if err == nil && lease.Annotations[kube.AnnotationMember] != w.memberID() {
		err = fmt.Errorf("the holder of the Lease is member %q", lease.Annotations[kube.AnnotationMember])
	}
	return err
}

// advance advances clock in steps, slowly enough for an agent to handle each step.
func advance(ctx context.Context, clock *testclock.FakeClock, span time.Duration) {
	const step = 5 * time.Second
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for ; span > 0 && ctx.Err() == nil; span -= step {
		clock.Step(step)
		<-ticker.C
	}
}

const duplicateMessage = "another cluster uses this cluster's registration"

func TestOneMemberAtATimeUsesARegistration(t *testing.T) {
	t.Parallel()
	first := newWorld(t)
	stop := first.startAgent()
	first.eventually("the first holds the Lease", first.holdsLease)
	second := first.newDuplicate()
	logged, clock := &logRecorder{}, testclock.NewFakeClock(time.Now())
	second.runAgentWith(logged.intoContext(t), agent.Options{Member: second.member.Config, Clock: clock})
	second.eventually("the second logs the duplicate registration", func(context.Context) error {
		advance(t.Context(), clock, 5*time.Second)
		return logged.checkLogged(duplicateMessage)
	})

	first.deliver(bundleOf("one", "a"), bundle.StateApplied)
	advance(t.Context(), clock, 4*time.Minute)
	if err := first.holdsLease(t.Context()); err != nil {
		t.Errorf("while the first works: %v", err)
	}
	second.wantDeleted("a")
	if lines := logged.linesWith(duplicateMessage); len(lines) != 1 {
		t.Errorf("messages: got %d, want 1", len(lines))
	}

	stop()
	advance(t.Context(), clock, 60*time.Second)
	if err := first.holdsLease(t.Context()); err != nil {
		t.Errorf("before the takeover delay has passed: %v", err)
	}
	advance(t.Context(), clock, 40*time.Second)
	second.eventually("the second takes over", second.holdsLease)
	second.deliver(bundleOf("two", "a"), bundle.StateApplied)
	second.wantValue("a", "two")
	first.wantValue("a", "one")

	// Now the first must wait. Its clock is behind.
	back := &logRecorder{}
	first.runAgent(back.intoContext(t), first.member.Config)
	first.eventually("the first logs the duplicate registration", func(context.Context) error { return back.checkLogged(duplicateMessage) })
	if err := second.holdsLease(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestAgentStopsWhenTheRegistrationIsTakenOver(t *testing.T) {
	t.Parallel()
	first := newWorld(t)
	logged := &logRecorder{}
	first.runAgent(logged.intoContext(t), first.member.Config)
	first.deliver(bundleOf("one", "a"), bundle.StateApplied)
	lease, err := first.lease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// The member claims a Lease that was created again.
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"towline.dev/member":null}}}`))
	if err := first.hubClient.Patch(t.Context(), lease, patch); err != nil {
		t.Fatal(err)
	}
	first.eventually("the Lease is claimed again", first.holdsLease)
	patch = client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"towline.dev/member":"another"}}}`))
	if err := first.hubClient.Patch(t.Context(), lease, patch); err != nil {
		t.Fatal(err)
	}
	first.eventually("the agent logs the duplicate registration", func(context.Context) error {
		return errors.Join(logged.checkLogged("another cluster took the registration over"), logged.checkLogged(duplicateMessage))
	})
}

func TestRebuiltMemberTakesTheRegistrationOver(t *testing.T) {
	t.Parallel()
	lost := newWorld(t)
	stop := lost.startAgent()
	lost.deliver(bundleOf("one", "a"), bundle.StateApplied)
	stop()

	rebuilt := lost.newDuplicate()
	// The manifest of another cluster was applied to this member before.
	stray := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
		Namespace: kube.AgentNamespace, Name: "c2-sveltos-kubeconfig", Labels: map[string]string{"app.kubernetes.io/name": "sveltos-applier"},
	}}
	if err := rebuilt.client.Create(t.Context(), stray); err != nil {
		t.Fatal(err)
	}
	// The clock starts at the last heartbeat of the lost member, because the start of the rebuilt one may take long.
	lease, err := lost.lease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	logged, clock := &logRecorder{}, testclock.NewFakeClock(lease.Spec.RenewTime.Time)
	rebuilt.runAgentWith(logged.intoContext(t), agent.Options{Member: rebuilt.member.Config, Clock: clock})
	rebuilt.eventually("the rebuilt one logs the duplicate registration", func(context.Context) error { return logged.checkLogged(duplicateMessage) })
	advance(t.Context(), clock, 85*time.Second)
	if err := lost.holdsLease(t.Context()); err != nil {
		t.Errorf("before the takeover delay has passed: %v", err)
	}
	advance(t.Context(), clock, 10*time.Second)
	rebuilt.deliver(bundleOf("one", "a"), bundle.StateApplied)
	rebuilt.wantValue("a", "one")
	if err := rebuilt.holdsLease(t.Context()); err != nil {
		t.Error(err)
	}
	if lines := logged.linesWith("c2-sveltos-kubeconfig"); len(lines) != 1 || len(logged.errorLines()) != 2 {
		t.Errorf("errors logged: got %v, want one about the other manifest and one about the other cluster", logged.errorLines())
	}
}
