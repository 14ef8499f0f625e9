package profiles

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
)

var errHub = errors.New("the hub fails")

// world is a fake hub with the ClusterProfile p, and its reconciler.
type world struct {
	*reconciler
	events *events.FakeRecorder
	// statusPatches is the number of patches of the profile's status.
	statusPatches int
	// failList makes each list of summaries fail.
	failList bool
}

// newWorld returns a world with objects, in which no summary can be created in the namespace us.
func newWorld(objects ...client.Object) *world {
	w := &world{events: events.NewFakeRecorder(100)}
	profile := clusterProfile("p", labelled("prod"))
	profile.UID, profile.Finalizers = "new", []string{configv1beta1.ClusterProfileFinalizer}
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithObjects(append(objects, profile)...).
		WithStatusSubresource(profile).WithIndex(&configv1beta1.ClusterSummary{}, summaries.ProfileIndex, summaries.ProfileIndexKeys).
		WithInterceptorFuncs(interceptor.Funcs{
			SubResourcePatch: func(ctx context.Context, c client.Client, sub string, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
				w.statusPatches++
				return c.SubResource(sub).Patch(ctx, obj, patch, opts...)
			},
			Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
				if obj.GetNamespace() == "us" {
					return errHub
				}
				return c.Create(ctx, obj, opts...)
			},
			List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
				if _, ok := list.(*configv1beta1.ClusterSummaryList); ok && w.failList {
					return errHub
				}
				return c.List(ctx, list, opts...)
			},
		}).Build()
	w.reconciler = &reconciler{kind: kinds()[0], Controller: &Controller{
		Hub: hub, Events: w.events, Unsupported: func(configv1beta1.ProfileSpec) []string { return nil },
	}}
	return w
}

func (w *world) reconcile(t *testing.T) (reconcile.Result, error) {
	t.Helper()
	return w.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Name: "p"}})
}

func (w *world) profile(t *testing.T) *configv1beta1.ClusterProfile {
	t.Helper()
	profile := &configv1beta1.ClusterProfile{}
	if err := w.Hub.Get(t.Context(), client.ObjectKey{Name: "p"}, profile); err != nil {
		t.Fatal(err)
	}
	return profile
}

// summary returns a summary of a profile for the cluster of that name in the namespace eu.
func summary(name, profile string, uid types.UID, clusterName string) *configv1beta1.ClusterSummary {
	s := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "eu", Name: name, Finalizers: []string{configv1beta1.ClusterSummaryFinalizer}}}
	owner := &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: profile, UID: uid}}
	s.OwnerReferences = []metav1.OwnerReference{kinds()[0].ownerReference(owner)}
	s.Spec.ClusterNamespace, s.Spec.ClusterName, s.Spec.ClusterType = "eu", clusterName, libv1beta1.ClusterType(fleet.TypeSveltos)
	return s
}

func terminatingSummary(name, profile string, uid types.UID, clusterName string) *configv1beta1.ClusterSummary {
	s := summary(name, profile, uid, clusterName)
	s.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	return s
}

func inUS(c *libv1beta1.SveltosCluster) { c.Namespace = "us" }

// TestTerminatingSummaryHoldsUpNoOther has a summary of an earlier profile that is still being deleted, a cluster that
// no longer matches, and a summary that cannot be created.
func TestTerminatingSummaryHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(cluster("prod"), cluster("prod", inUS), terminatingSummary("p-sveltos-a", "p", "old", "a"), summary("unmatched", "p", "new", "gone"))
	if _, err := w.reconcile(t); !errors.Is(err, errHub) {
		t.Errorf("the error is %v, want that of the summary in us", err)
	}
	unmatched := &configv1beta1.ClusterSummary{}
	if err := w.Hub.Get(t.Context(), client.ObjectKey{Namespace: "eu", Name: "unmatched"}, unmatched); err != nil || unmatched.DeletionTimestamp == nil {
		t.Errorf("the summary of the cluster that no longer matches is not deleted: %v", err)
	}
	if reason := w.profile(t).Status.SuspensionReason; reason != "summary p-sveltos-a of an earlier ClusterProfile is being deleted" {
		t.Errorf("the profile is suspended because %q", reason)
	}
}

// TestPauseDoesNotStopWithdrawals pauses a profile while the summary of a cluster that no longer matches is withdrawn.
func TestPauseDoesNotStopWithdrawals(t *testing.T) {
	t.Parallel()
	w := newWorld(cluster("prod"), summary("matched", "p", "new", "a"), terminatingSummary("unmatched", "p", "new", "gone"))
	profile := w.profile(t)
	profile.Annotations = map[string]string{libv1beta1.ProfilePausedAnnotation: "true"}
	if err := w.Hub.Update(t.Context(), profile); err != nil {
		t.Fatal(err)
	}
	if _, err := w.reconcile(t); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"matched": true, "unmatched": false} {
		live := &configv1beta1.ClusterSummary{}
		if err := w.Hub.Get(t.Context(), client.ObjectKey{Namespace: "eu", Name: name}, live); err != nil {
			t.Fatal(err)
		}
		if _, isPaused := live.Annotations[libv1beta1.ProfilePausedAnnotation]; isPaused != want {
			t.Errorf("summary %s is paused: %t, want %t", name, isPaused, want)
		}
	}
}

// TestWaitingProfileIsReportedOnce reconciles a profile that waits several times.
func TestWaitingProfileIsReportedOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(cluster("prod"), terminatingSummary("p-sveltos-a", "p", "old", "a"))
	for range 3 {
		// A summary without an owner reference triggers no reconcile.
		if result, err := w.reconcile(t); err != nil || result.RequeueAfter == 0 {
			t.Fatalf("Reconcile() = %+v, %v; want a delay", result, err)
		}
	}
	w.failList = true
	if _, err := w.reconcile(t); !errors.Is(err, errHub) {
		t.Fatalf("the error is %v", err)
	}
	if w.statusPatches != 1 || len(w.events.Events) != 1 {
		t.Errorf("%d patches of the status and %d events, want one of each", w.statusPatches, len(w.events.Events))
	}
	if profile := w.profile(t); profile.Status.SuspensionReason == "" || len(profile.Status.MatchingClusters) != 1 {
		t.Errorf("the status is %+v", profile.Status)
	}
}

// TestTakeOver has summaries of an earlier profile of the same name, under both names that a summary can have.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	member := fleet.FromObject(cluster("prod"))
	name, distinct := match.SummaryName(configv1beta1.ClusterProfileKind, "p", member), match.DistinctSummaryName(configv1beta1.ClusterProfileKind, "p", member)
	for test, summaries := range map[string][]client.Object{
		"the name":                             {summary(name, "p", "old", "a")},
		"the distinct name":                    {summary(distinct, "p", "old", "a"), summary(name, "other", "other", "a")},
		"the distinct name, the other is free": {summary(distinct, "p", "old", "a")},
	} {
		t.Run(test, func(t *testing.T) {
			t.Parallel()
			w := newWorld(append(summaries, cluster("prod"))...)
			if _, err := w.reconcile(t); err != nil {
				t.Fatal(err)
			}
			var list configv1beta1.ClusterSummaryList
			if err := w.Hub.List(t.Context(), &list); err != nil {
				t.Fatal(err)
			}
			if len(list.Items) != len(summaries) {
				t.Errorf("%d summaries, want %d", len(list.Items), len(summaries))
			}
			taken := &configv1beta1.ClusterSummary{}
			if err := w.Hub.Get(t.Context(), client.ObjectKeyFromObject(summaries[0]), taken); err != nil || taken.OwnerReferences[0].UID != "new" {
				t.Errorf("the owner is %v: %v", taken.OwnerReferences, err)
			}
		})
	}
}

// TestSummariesOfOthersAreNotLoaded has summaries that users of one namespace could write, with the UID of the profile.
func TestSummariesOfOthersAreNotLoaded(t *testing.T) {
	t.Parallel()
	owned := func(change func(*metav1.OwnerReference)) *configv1beta1.ClusterSummary {
		s := summary("forged", "p", "new", "a")
		change(&s.OwnerReferences[0])
		return s
	}
	for name, forged := range map[string]*configv1beta1.ClusterSummary{
		"no controller":       owned(func(r *metav1.OwnerReference) { r.Controller = nil }),
		"a Profile":           owned(func(r *metav1.OwnerReference) { r.Kind = configv1beta1.ProfileKind }),
		"a kind of others":    owned(func(r *metav1.OwnerReference) { r.Kind = "Foo" }),
		"a group of others":   owned(func(r *metav1.OwnerReference) { r.APIVersion = "example.com/v1beta1" }),
		"a Profile of others": owned(func(r *metav1.OwnerReference) { r.Kind, r.UID = configv1beta1.ProfileKind, "profile" }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(cluster("prod"), forged)
			if _, err := w.reconcile(t); err != nil {
				t.Fatal(err)
			}
			theirs := &configv1beta1.Profile{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "p", UID: "profile"}}
			for profile, kind := range map[client.Object]kind{w.profile(t): kinds()[0], theirs: kinds()[1]} {
				r := &reconciler{kind: kind, Controller: w.Controller}
				s := r.newState(profile)
				if err := r.load(t.Context(), s); err != nil {
					t.Fatal(err)
				}
				for _, loaded := range s.summaries {
					if loaded.Name == forged.Name {
						t.Errorf("%s has the summary with the owner %+v", kind.name, forged.OwnerReferences[0])
					}
				}
			}
			after := &configv1beta1.ClusterSummary{}
			if err := w.Hub.Get(t.Context(), client.ObjectKeyFromObject(forged), after); err != nil || !cmp.Equal(after.OwnerReferences, forged.OwnerReferences) {
				t.Errorf("the owners are %+v, error %v", after.OwnerReferences, err)
			}
		})
	}
}

// TestSpecOfATakenOverSummary has a OneTime summary without a status, which may have been delivered, of an earlier
// profile with the same name. Without the owner reference, which only administrators write, its spec is not trusted.
func TestSpecOfATakenOverSummary(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		hasOwner bool
		want     string
	}{"with the owner reference": {true, "delivered"}, "with the label": {false, "wanted"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			existing := summary(match.SummaryName(configv1beta1.ClusterProfileKind, "p", fleet.FromObject(cluster("prod"))), "p", "old", "a")
			existing.Labels = map[string]string{configv1beta1.ClusterProfileNameLabel: "p"}
			existing.Spec.ClusterProfileSpec = configv1beta1.ProfileSpec{SyncMode: configv1beta1.SyncModeOneTime, PolicyRefs: []libv1beta1.PolicyRef{{Name: "delivered"}}}
			if !test.hasOwner {
				existing.OwnerReferences = nil
			}
			w := newWorld(cluster("prod"), existing)
			profile := w.profile(t)
			profile.Spec.SyncMode, profile.Spec.PolicyRefs = configv1beta1.SyncModeOneTime, []libv1beta1.PolicyRef{{Name: "wanted"}}
			if err := w.Hub.Update(t.Context(), profile); err != nil {
				t.Fatal(err)
			}
			if _, err := w.reconcile(t); err != nil {
				t.Fatal(err)
			}
			after := &configv1beta1.ClusterSummary{}
			if err := w.Hub.Get(t.Context(), client.ObjectKeyFromObject(existing), after); err != nil || !metav1.IsControlledBy(after, profile) {
				t.Fatalf("the owners are %+v, error %v", after.OwnerReferences, err)
			}
			if got := after.Spec.ClusterProfileSpec.PolicyRefs[0].Name; got != test.want {
				t.Errorf("the content is %q, want %q", got, test.want)
			}
		})
	}
}

// TestBothNamesInUse has summaries of other profiles with both names: the error is retried with a growing delay.
func TestBothNamesInUse(t *testing.T) {
	t.Parallel()
	member := fleet.FromObject(cluster("prod"))
	w := newWorld(cluster("prod"), summary(match.SummaryName(configv1beta1.ClusterProfileKind, "p", member), "other", "other", "a"),
		summary(match.DistinctSummaryName(configv1beta1.ClusterProfileKind, "p", member), "other", "other", "a"))
	if _, err := w.reconcile(t); err == nil {
		t.Error("no error")
	}
}
