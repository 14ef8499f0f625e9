package drift_test

import (
	"context"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/discovery"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/drift"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// engine applies objects with a function.
type engine struct {
	apply func(ctx context.Context, only map[kube.Ref]bool) error
	// next is the time of the next attempt after a failure.
	next time.Time
}

func (engine) Acquire(context.Context, bundle.ID) (unlock func(), err error) { return func() {}, nil }

func (e engine) Resume(ctx context.Context, _ bundle.ID, only map[kube.Ref]bool) (drift.Result, error) {
	return drift.Result{}, e.apply(ctx, only)
}

func (e engine) NextAttempt(bundle.ID, bundle.Digest) (at time.Time, ok bool) { return e.next, true }

func (engine) ResumeWithdrawal(context.Context, bundle.ID) (done bool, err error) { return true, nil }

func (engine) PollPause(bundle.ID) (pause time.Duration, ok bool) { return 0, false }

// bundleOnMember is a bundle that was applied: ConfigMaps of one namespace, and their record.
type bundleOnMember struct {
	t       *testing.T
	maps    corev1client.ConfigMapInterface
	ns      string
	options drift.Options
}

func newBundleOnMember(t *testing.T, names ...string) *bundleOnMember {
	t.Helper()
	return newBundleInState(t, bundle.StateApplied, names...)
}

func newBundleInState(t *testing.T, state bundle.State, names ...string) *bundleOnMember {
	t.Helper()
	plane := localkube.Shared(t)
	core, objects := corev1client.NewForConfigOrDie(plane.Config), metadata.NewForConfigOrDie(plane.Config)
	b := &bundleOnMember{t: t, ns: plane.Namespace(t, "drift")}
	b.maps = core.ConfigMaps(b.ns)
	b.options = drift.Options{
		Store: inventory.NewStore(core, objects, b.ns, inventory.OwnerScope{}), Metadata: objects,
		Mapper: kube.NewMapper(discovery.NewDiscoveryClientForConfigOrDie(plane.Config)), Clock: clock.RealClock{},
		OnCorrect: func(bundle.ID, bundle.ChangeSet) {}, OnReport: func(bundle.ID) {}, OnRecordMissing: func(bundle.ID) {}, OnChange: func(bundle.ID) {},
	}
	none, err := b.options.Store.Load(t.Context(), b.id())
	if err != nil {
		t.Fatal(err)
	}
	next := none.Edit()
	next.State, next.Options.CorrectDrift = state, true
	for _, name := range names {
		if err := b.apply(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		meta, err := objects.Resource(corev1.SchemeGroupVersion.WithResource("configmaps")).Namespace(b.ns).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		next.Entries[b.ref(name).Key()] = inventory.Entry{Ref: b.ref(name), UID: meta.UID, Fingerprint: inventory.LiveMetaOf(meta).Fingerprint()}
	}
	if _, err := b.options.Store.Save(t.Context(), none, next, &bundle.Bundle{ID: b.id()}); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bundleOnMember) id() bundle.ID {
	return bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "eu/web", Feature: "Resources"}
}

func (b *bundleOnMember) ref(name string) kube.Ref {
	return kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: b.ns, Name: name}
}

// apply applies one object as the engine does.
func (b *bundleOnMember) apply(ctx context.Context, name string) error {
	obj := applycorev1.ConfigMap(name, b.ns).WithData(map[string]string{"k": "applied"}).
		WithLabels(map[string]string{kube.LabelReason: b.id().Feature}).
		WithAnnotations(map[string]string{kube.AnnotationRequestor: b.id().String()})
	_, err := b.maps.Apply(ctx, obj, metav1.ApplyOptions{FieldManager: kube.FieldManager, Force: true})
	return err
}

// run runs a Corrector with the given Engine until the test ends.
func (b *bundleOnMember) run(e drift.Engine) {
	b.options.Engine = e
	ctx, stop := context.WithCancel(b.t.Context())
	var running sync.WaitGroup
	running.Go(func() { drift.New(b.options).Run(ctx) })
	b.t.Cleanup(func() { stop(); running.Wait() })
}

// edit changes an object as a person does.
func (b *bundleOnMember) edit(name string) {
	b.t.Helper()
	patch := []byte(`{"data":{"k":"edited"}}`)
	if _, err := b.maps.Patch(b.t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "person"}); err != nil {
		b.t.Fatal(err)
	}
}

// wantCorrected waits until an object is as it was applied.
func (b *bundleOnMember) wantCorrected(name string) {
	b.t.Helper()
	err := wait.PollUntilContextTimeout(b.t.Context(), 20*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		obj, err := b.maps.Get(ctx, name, metav1.GetOptions{})
		return err == nil && obj.Data["k"] == "applied", err
	})
	if err != nil {
		b.t.Errorf("%s is not corrected: %v", name, err)
	}
}

func TestOnlyTheObjectThatOthersChangedIsCorrected(t *testing.T) {
	t.Parallel()
	b := newBundleOnMember(t, "edited", "untouched")
	b.edit("edited")
	b.run(engine{apply: func(ctx context.Context, only map[kube.Ref]bool) error {
		if len(only) != 1 || !only[b.ref("edited").Key()] {
			t.Errorf("corrects %v", only)
		}
		return b.apply(ctx, "edited")
	}})
	b.wantCorrected("edited")
}

// TestFirstCorrectionIsNotDelayed has a clock that stands still: a correction that waits for it never runs.
func TestFirstCorrectionIsNotDelayed(t *testing.T) {
	t.Parallel()
	b := newBundleOnMember(t, "edited")
	b.options.Clock = clocktesting.NewFakeClock(time.Now())
	b.run(engine{apply: func(ctx context.Context, _ map[kube.Ref]bool) error { return b.apply(ctx, "edited") }})
	b.edit("edited")
	b.wantCorrected("edited")
}

func TestFailedCorrectionIsRetried(t *testing.T) {
	t.Parallel()
	b := newBundleOnMember(t, "edited")
	failed := false
	b.run(engine{apply: func(ctx context.Context, _ map[kube.Ref]bool) error {
		if !failed { // one run at a time
			failed = true
			return context.DeadlineExceeded
		}
		return b.apply(ctx, "edited")
	}})
	b.edit("edited")
	b.wantCorrected("edited")
}

func TestDeletedRecordIsReported(t *testing.T) {
	t.Parallel()
	b := newBundleOnMember(t, "untouched")
	reported := make(chan bundle.ID, 1)
	b.options.OnRecordMissing = func(id bundle.ID) {
		select {
		case reported <- id:
		default:
		}
	}
	rec := b.options.Store.Cached(b.id())
	name := b.options.Store.SecretNames(rec)[0]
	secrets := b.options.Metadata.Resource(corev1.SchemeGroupVersion.WithResource("secrets")).Namespace(b.ns)
	b.run(engine{apply: func(_ context.Context, only map[kube.Ref]bool) error {
		t.Errorf("corrects %v", only)
		return nil
	}})
	if err := secrets.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	select {
	case id := <-reported:
		if id != b.id() {
			t.Errorf("reported %s", id)
		}
	case <-time.After(30 * time.Second):
		t.Error("the deletion is not reported")
	}
}

// TestDriftDoesNotShortenTheBackoffOfAFailedBundle corrects drift in a failed bundle before its next attempt is due.
func TestDriftDoesNotShortenTheBackoffOfAFailedBundle(t *testing.T) {
	t.Parallel()
	b := newBundleInState(t, bundle.StateFailed, "first", "second")
	b.run(engine{next: time.Now().Add(time.Hour), apply: func(ctx context.Context, only map[kube.Ref]bool) error {
		if len(only) != 1 {
			t.Errorf("corrects %v, want one object", only)
		}
		for ref := range only {
			return b.apply(ctx, ref.Name)
		}
		return nil
	}})
	b.edit("first")
	b.wantCorrected("first")
	b.edit("second")
	b.wantCorrected("second")
}
