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

// another returns another member, to which a manifest of the same registration was applied.
func (w *world) another() *world {
	w.t.Helper()
	other := &world{
		t: w.t, hub: w.hub, member: localkube.ForTest(w.t, localkube.Named("other")), hubClient: w.hubClient, outbox: w.outbox, cluster: w.cluster,
	}
	other.client = other.clientOf(other.member)
	other.register()
	return other
}

// uid is that of the member's namespace kube-system.
func (w *world) uid() string {
	w.t.Helper()
	namespace := &corev1.Namespace{}
	if err := w.client.Get(w.t.Context(), client.ObjectKey{Name: metav1.NamespaceSystem}, namespace); err != nil {
		w.t.Fatal(err)
	}
	return string(namespace.UID)
}

// holds returns an error unless the Lease is this member's.
func (w *world) holds(ctx context.Context) error {
	lease, err := w.lease(ctx)
	if err == nil && lease.Annotations[kube.AnnotationMember] != w.uid() {
		err = fmt.Errorf("the Lease is that of member %q", lease.Annotations[kube.AnnotationMember])
	}
	return err
}

// pass lets time pass for clock, slower than an agent needs to see each step.
func pass(ctx context.Context, clock *testclock.FakeClock, span time.Duration) {
	const step = 5 * time.Second
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for ; span > 0 && ctx.Err() == nil; span -= step {
		clock.Step(step)
		<-ticker.C
	}
}

const duplicateMessage = "another cluster uses this cluster's registration"

func TestOneOfTwoMembersWithOneRegistrationWorks(t *testing.T) {
	t.Parallel()
	first := newWorld(t)
	stop := first.startAgent()
	first.eventually("the first holds the Lease", first.holds)
	second := first.another()
	logged, clock := &journal{}, testclock.NewFakeClock(time.Now())
	second.runAgentWith(logged.context(t), agent.Options{Member: second.member.Config, Clock: clock})
	second.eventually("the second says what is wrong", func(context.Context) error {
		pass(t.Context(), clock, 5*time.Second)
		return logged.missing(duplicateMessage)
	})

	first.deliver(bundleOf("one", "a"), bundle.StateApplied)
	pass(t.Context(), clock, 4*time.Minute)
	if err := first.holds(t.Context()); err != nil {
		t.Errorf("while the first works: %v", err)
	}
	second.wantGone("a")
	if said := logged.with(duplicateMessage); len(said) != 1 {
		t.Errorf("messages: got %d, want 1", len(said))
	}

	stop()
	pass(t.Context(), clock, 60*time.Second)
	if err := first.holds(t.Context()); err != nil {
		t.Errorf("before the first was silent for long: %v", err)
	}
	pass(t.Context(), clock, 40*time.Second)
	second.eventually("the second takes over", second.holds)
	second.deliver(bundleOf("two", "a"), bundle.StateApplied)
	second.wantValue("a", "two")
	first.wantValue("a", "one")

	// Now it is the first that has to wait, whose clock is behind.
	back := &journal{}
	first.runAgent(back.context(t), first.member.Config)
	first.eventually("the first says what is wrong", func(context.Context) error { return back.missing(duplicateMessage) })
	if err := second.holds(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestDisplacedMemberStopsWorking(t *testing.T) {
	t.Parallel()
	first := newWorld(t)
	logged := &journal{}
	first.runAgent(logged.context(t), first.member.Config)
	first.deliver(bundleOf("one", "a"), bundle.StateApplied)
	lease, err := first.lease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// A Lease that was made anew becomes this member's again.
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"towline.dev/member":null}}}`))
	if err := first.hubClient.Patch(t.Context(), lease, patch); err != nil {
		t.Fatal(err)
	}
	first.eventually("the Lease is claimed again", first.holds)
	patch = client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"towline.dev/member":"somebody"}}}`))
	if err := first.hubClient.Patch(t.Context(), lease, patch); err != nil {
		t.Fatal(err)
	}
	first.eventually("the agent says what is wrong", func(context.Context) error {
		return errors.Join(logged.missing("another cluster took the registration over"), logged.missing(duplicateMessage))
	})
}

func TestRebuiltMemberTakesOver(t *testing.T) {
	t.Parallel()
	lost := newWorld(t)
	stop := lost.startAgent()
	lost.deliver(bundleOf("one", "a"), bundle.StateApplied)
	stop()

	rebuilt := lost.another()
	// Somebody applied a manifest for another cluster here, too, before that.
	stray := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
		Namespace: kube.AgentNamespace, Name: "c2-sveltos-kubeconfig", Labels: map[string]string{"app.kubernetes.io/name": "sveltos-applier"},
	}}
	if err := rebuilt.client.Create(t.Context(), stray); err != nil {
		t.Fatal(err)
	}
	// The world lost is silent only by its own, real clock: it may take long to build another.
	lease, err := lost.lease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	logged, clock := &journal{}, testclock.NewFakeClock(lease.Spec.RenewTime.Time)
	rebuilt.runAgentWith(logged.context(t), agent.Options{Member: rebuilt.member.Config, Clock: clock})
	rebuilt.eventually("the rebuilt one says that it waits", func(context.Context) error { return logged.missing(duplicateMessage) })
	pass(t.Context(), clock, 85*time.Second)
	if err := lost.holds(t.Context()); err != nil {
		t.Errorf("before the lost one was silent for long: %v", err)
	}
	pass(t.Context(), clock, 10*time.Second)
	rebuilt.deliver(bundleOf("one", "a"), bundle.StateApplied)
	rebuilt.wantValue("a", "one")
	if err := rebuilt.holds(t.Context()); err != nil {
		t.Error(err)
	}
	if said := logged.with("c2-sveltos-kubeconfig"); len(said) != 1 || len(logged.errors()) != 2 {
		t.Errorf("errors logged: got %v, want one about the other manifest and one about the other cluster", logged.errors())
	}
}
