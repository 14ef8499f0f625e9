package profiles

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/kube"
)

type requestQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]

func newQueue(t *testing.T) requestQueue {
	t.Helper()
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	t.Cleanup(queue.ShutDown)
	return queue
}

// queued returns the names in the queue, sorted.
func queued(queue requestQueue) []string {
	var names []string
	for queue.Len() > 0 {
		request, _ := queue.Get()
		queue.Done(request)
		names = append(names, request.String())
	}
	slices.Sort(names)
	return names
}

func clusterProfile(name string, spec configv1beta1.ProfileSpec) *configv1beta1.ClusterProfile {
	return &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1}, Spec: spec}
}

func labelled(env string) configv1beta1.ProfileSpec {
	return configv1beta1.ProfileSpec{ClusterSelector: metav1.LabelSelector{MatchLabels: map[string]string{"env": env}}}
}

// cluster returns a ready cluster eu/a with a label, after the changes.
func cluster(env string, changes ...func(*libv1beta1.SveltosCluster)) *libv1beta1.SveltosCluster {
	c := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "eu", Name: "a", Labels: map[string]string{"env": env}, Finalizers: []string{kube.FinalizerCluster}}}
	c.Status.Ready = true
	for _, change := range changes {
		change(c)
	}
	return c
}

func newReconciler(k kind, profiles ...client.Object) *reconciler {
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithObjects(profiles...).Build()
	return &reconciler{Controller: &Controller{Hub: hub}, kind: k, agentLimiter: ratelimit.New(agentInterval, agentBurst, clock.RealClock{})}
}

// An agent sets Ready and removes it, again and again. The hub's own changes are not delayed.
func TestReadyOfAnAgentIsLimited(t *testing.T) {
	t.Parallel()
	r, queue := newReconciler(kinds()[0], clusterProfile("prod", labelled("prod"))), newQueue(t)
	pull := func(c *libv1beta1.SveltosCluster) { c.Spec.PullMode = true }
	ready, notReady := cluster("prod", pull), cluster("prod", pull, func(c *libv1beta1.SveltosCluster) { c.Status.Ready = false })
	reconciles := 0
	for range 5 * agentBurst {
		r.clusterEvents().Update(t.Context(), event.UpdateEvent{ObjectOld: ready, ObjectNew: notReady}, queue)
		reconciles += len(queued(queue))
	}
	if reconciles < agentBurst || reconciles > 2*agentBurst {
		t.Errorf("%d reconciles at once, want about %d", reconciles, agentBurst)
	}
	unlabelled := cluster("test", pull)
	r.clusterEvents().Update(t.Context(), event.UpdateEvent{ObjectOld: ready, ObjectNew: unlabelled}, queue)
	if got := queued(queue); len(got) != 1 {
		t.Errorf("a change of labels enqueues %v at once", got)
	}
}

func TestClusterEventsEnqueueAffectedProfiles(t *testing.T) {
	t.Parallel()
	profiles := []client.Object{
		clusterProfile("prod", labelled("prod")), clusterProfile("test", labelled("test")),
		clusterProfile("named", configv1beta1.ProfileSpec{ClusterRefs: []corev1.ObjectReference{{Kind: "SveltosCluster", Namespace: "eu", Name: "a"}}}),
		clusterProfile("other", configv1beta1.ProfileSpec{ClusterRefs: []corev1.ObjectReference{{Kind: "SveltosCluster", Namespace: "eu", Name: "b"}}}),
		clusterProfile("invalid", configv1beta1.ProfileSpec{ClusterSelector: metav1.LabelSelector{
			MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "env", Operator: "Near"}},
		}}),
	}
	update := func(before, after *libv1beta1.SveltosCluster) func(*reconciler, requestQueue) {
		return func(r *reconciler, queue requestQueue) {
			r.clusterEvents().Update(t.Context(), event.UpdateEvent{ObjectOld: before, ObjectNew: after}, queue)
		}
	}
	deleting := func(c *libv1beta1.SveltosCluster) { c.DeletionTimestamp = &metav1.Time{Time: time.Now()} }
	for name, test := range map[string]struct {
		send func(*reconciler, requestQueue)
		want []string
	}{
		"a new cluster": {
			send: func(r *reconciler, queue requestQueue) {
				r.clusterEvents().Create(t.Context(), event.CreateEvent{Object: cluster("prod")}, queue)
			},
			want: []string{"/named", "/prod"},
		},
		"a deleted cluster": {
			send: func(r *reconciler, queue requestQueue) {
				r.clusterEvents().Delete(t.Context(), event.DeleteEvent{Object: cluster("prod", deleting)}, queue)
			},
			want: []string{"/named", "/prod"},
		},
		"labels for another profile":       {send: update(cluster("prod"), cluster("test")), want: []string{"/prod", "/test"}},
		"a label that no profile reads":    {send: update(cluster("prod"), cluster("prod", func(c *libv1beta1.SveltosCluster) { c.Labels["x"] = "y" }))},
		"a cluster that becomes ready":     {send: update(cluster("prod", func(c *libv1beta1.SveltosCluster) { c.Status.Ready = false }), cluster("prod")), want: []string{"/named", "/prod"}},
		"a cluster that gets a finalizer":  {send: update(cluster("prod", func(c *libv1beta1.SveltosCluster) { c.Finalizers = nil }), cluster("prod")), want: []string{"/named", "/prod"}},
		"the deregistration of a cluster":  {send: update(cluster("prod"), cluster("prod", deleting)), want: []string{"/named", "/prod"}},
		"a heartbeat":                      {send: update(cluster("prod"), cluster("prod", func(c *libv1beta1.SveltosCluster) { c.Status.AgentLastReportTime = &metav1.Time{Time: time.Now()} }))},
		"a change of an unmatched cluster": {send: update(cluster("none"), cluster("none", func(c *libv1beta1.SveltosCluster) { c.Status.Ready = false })), want: []string{"/named"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, queue := newReconciler(kinds()[0], profiles...), newQueue(t)
			test.send(r, queue)
			if diff := cmp.Diff(test.want, queued(queue)); diff != "" {
				t.Errorf("enqueued profiles (-want +got):\n%s", diff)
			}
		})
	}
}

// TestReportsOfAgentsReadNoProfiles has a client that cannot list profiles.
func TestReportsOfAgentsReadNoProfiles(t *testing.T) {
	t.Parallel()
	r, queue := newReconciler(kinds()[0]), newQueue(t)
	r.Hub = nil
	r.clusterEvents().Update(t.Context(), event.UpdateEvent{ObjectOld: cluster("prod"), ObjectNew: cluster("prod", func(c *libv1beta1.SveltosCluster) {
		c.Status.Version = "v1.36.3"
	})}, queue)
}

func TestClusterEventsEnqueueProfilesOfTheirNamespace(t *testing.T) {
	t.Parallel()
	in := func(namespace string) *configv1beta1.Profile {
		return &configv1beta1.Profile{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p", Generation: 1}, Spec: labelled("prod")}
	}
	r, queue := newReconciler(kinds()[1], in("eu"), in("us")), newQueue(t)
	r.clusterEvents().Create(t.Context(), event.CreateEvent{Object: cluster("prod")}, queue)
	if diff := cmp.Diff([]string{"eu/p"}, queued(queue)); diff != "" {
		t.Errorf("enqueued profiles (-want +got):\n%s", diff)
	}
}

// TestSelectionFollowsTheProfile changes the selector of a profile, and creates the profile again with another one.
func TestSelectionFollowsTheProfile(t *testing.T) {
	t.Parallel()
	r := newReconciler(kinds()[0])
	for _, version := range []struct {
		uid, env   string
		generation int64
	}{{"1", "prod", 1}, {"1", "test", 2}, {"2", "stage", 2}} {
		profile := clusterProfile("p", labelled(version.env))
		profile.UID, profile.Generation = types.UID(version.uid), version.generation
		selection, err := r.selections.get(r.kind, profile)
		if err != nil {
			t.Fatal(err)
		}
		for _, env := range []string{"prod", "test", "stage"} {
			if got := selection.Selects(fleet.FromObject(cluster(env))); got != (env == version.env) {
				t.Errorf("generation %d of %s selects %s: %t", version.generation, version.uid, env, got)
			}
		}
	}
}

// TestClusterEventsAreGathered sends events just after a change of the matching clusters, and long after one.
func TestClusterEventsAreGathered(t *testing.T) {
	t.Parallel()
	r, queue := newReconciler(kinds()[0], clusterProfile("prod", labelled("prod")), clusterProfile("idle", labelled("prod"))), newQueue(t)
	r.matchTimes.record(client.ObjectKey{Name: "prod"}, time.Now())
	r.matchTimes.record(client.ObjectKey{Name: "idle"}, time.Now().Add(-gatherInterval))
	for range 3 {
		r.clusterEvents().Create(t.Context(), event.CreateEvent{Object: cluster("prod")}, queue)
	}
	if diff := cmp.Diff([]string{"/idle"}, queued(queue)); diff != "" {
		t.Errorf("profiles that are enqueued at once (-want +got):\n%s", diff)
	}
	if request, _ := queue.Get(); request.Name != "prod" {
		t.Errorf("enqueued later: %s", request)
	}
}

// TestSummaryEventsAreGathered sends events of the summaries of two profiles, of which one was just reconciled.
func TestSummaryEventsAreGathered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newReconciler(kinds()[0])
		queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
		defer queue.ShutDown()
		r.reconcileTimes.record(client.ObjectKey{Name: "busy"}, time.Now())
		for _, owner := range []metav1.OwnerReference{
			{Kind: configv1beta1.ClusterProfileKind, Name: "busy"}, {Kind: configv1beta1.ClusterProfileKind, Name: "idle"}, {Kind: configv1beta1.ProfileKind, Name: "other"},
		} {
			owner.APIVersion, owner.Controller = configv1beta1.GroupVersion.String(), ptr.To(true)
			summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "eu", Name: "a", OwnerReferences: []metav1.OwnerReference{owner}}}
			for range 3 {
				r.summaryEvents().Delete(t.Context(), event.DeleteEvent{Object: summary}, queue)
				r.summaryEvents().Update(t.Context(), event.UpdateEvent{ObjectOld: summary, ObjectNew: summary}, queue)
			}
			r.summaryEvents().Create(t.Context(), event.CreateEvent{Object: summary}, queue)
		}
		for _, want := range [][]string{{"/idle"}, {"/busy"}} {
			synctest.Wait()
			if diff := cmp.Diff(want, queued(queue)); diff != "" {
				t.Errorf("enqueued profiles (-want +got):\n%s", diff)
			}
			<-time.After(summaryGatherInterval)
		}
	})
}

// TestIgnoreStatusUpdates changes one part of a summary after another.
func TestIgnoreStatusUpdates(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*configv1beta1.ClusterSummary)
		want   bool
	}{
		"status":     {func(s *configv1beta1.ClusterSummary) { s.Status.FeatureSummaries = []configv1beta1.FeatureSummary{{}} }, false},
		"finalizers": {func(s *configv1beta1.ClusterSummary) { s.Finalizers = nil }, false},
		"owner":      {func(s *configv1beta1.ClusterSummary) { s.OwnerReferences = nil }, true},
		"deletion":   {func(s *configv1beta1.ClusterSummary) { s.DeletionTimestamp = &metav1.Time{Time: time.Now()} }, true},
		"labels":     {func(s *configv1beta1.ClusterSummary) { s.Labels = map[string]string{"a": "b"} }, true},
		"spec":       {func(s *configv1beta1.ClusterSummary) { s.Generation++ }, true},
	} {
		existing := summary("s", "p", "new", "a")
		updated := existing.DeepCopy()
		test.change(updated)
		if got := ignoreStatusUpdates().Update(event.UpdateEvent{ObjectOld: existing, ObjectNew: updated}); got != test.want {
			t.Errorf("a change of the %s passes: %t, want %t", name, got, test.want)
		}
	}
}
