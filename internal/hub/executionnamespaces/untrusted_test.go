package executionnamespaces_test

import (
	"context"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

// getCluster returns the Cluster of this name, or nil if it does not exist.
func (w *testEnv) getCluster(t *testing.T, name string) *clusterv1alpha1.Cluster {
	t.Helper()
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name)}
	if !w.exists(t, w.hubClient, c) {
		return nil
	}
	return c
}

func TestStatusDoesNotAbandonReachableCluster(t *testing.T) {
	t.Parallel()
	statuses := map[string]func(w *testEnv, t *testing.T, name string){
		"false":   func(w *testEnv, t *testing.T, name string) { w.setReady(t, name, metav1.ConditionFalse) },
		"unknown": func(w *testEnv, t *testing.T, name string) { w.setReady(t, name, metav1.ConditionUnknown) },
		"cleared": func(w *testEnv, t *testing.T, name string) {
			cleared := client.RawPatch("application/merge-patch+json", []byte(`{"status":null}`))
			if err := w.hubClient.Status().Patch(t.Context(), w.getCluster(t, name), cleared); err != nil {
				t.Fatal(err)
			}
		},
	}
	for mode, prefix := range map[clusterv1alpha1.ClusterSyncMode]string{clusterv1alpha1.Push: "push-says-", clusterv1alpha1.Pull: "pull-says-"} {
		for description, setStatus := range statuses {
			name := prefix + description
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := newManualController(t, sharedEnv(t))
				s.controller.Config = func(context.Context, fleet.Member) (*rest.Config, error) { return s.member.Config, nil }
				work := s.startRemoval(t, name, mode)
				setStatus(s.testEnv, t, name)
				for range 5 {
					s.clock.Step(5 * time.Second)
					if mode == clusterv1alpha1.Pull {
						s.renewLease(t, name)
					}
					s.reconcile(t, name)
				}
				c := s.getCluster(t, name)
				if c == nil || fleet.FromCluster(c).Abandoned || fleet.FromCluster(c).Forced || len(s.forgotten) > 0 {
					t.Errorf("the Cluster is abandoned: %+v", c)
				}
				if !s.exists(t, s.hubClient, work) {
					t.Error("the Work is released")
				}
			})
		}
	}
}

// TestClusterOfAbandonedRegistrationIsDeleted checks that only a Cluster that was never in use is deleted.
func TestClusterOfAbandonedRegistrationIsDeleted(t *testing.T) {
	t.Parallel()
	s := newManualController(t, sharedEnv(t))
	nothing := func(string) {}
	tests := map[string]struct {
		// firstUse is the time from the start of the test to the first use of the token.
		firstUse time.Duration
		// use is called after the first reconcile.
		use func(cluster string)
		// alive renews the Lease before each reconcile.
		alive, stays bool
	}{
		"used-now": {use: nothing},
		// A restored hub has Clusters with a new creation time and an old first use, and no heartbeats.
		"used-before-a-restore": {firstUse: -7 * 24 * time.Hour, use: nothing},
		"used-later":            {firstUse: time.Hour, use: nothing, stays: true},
		"renewed-once":          {use: func(cluster string) { s.renewLease(t, cluster) }},
		"reported-once":         {use: func(cluster string) { s.setReady(t, cluster, metav1.ConditionTrue) }},
		"alive-and-not-ready":   {use: func(cluster string) { s.setReady(t, cluster, metav1.ConditionFalse) }, alive: true, stays: true},
		"ready-once": {use: func(cluster string) {
			s.renewLease(t, cluster)
			s.setReady(t, cluster, metav1.ConditionTrue)
			s.reconcile(t, cluster)
			// The status is lost.
			if err := s.hubClient.Status().Patch(t.Context(), s.getCluster(t, cluster), client.RawPatch("application/merge-patch+json", []byte(`{"status":null}`))); err != nil {
				t.Fatal(err)
			}
		}, stays: true},
		"with-content": {use: func(cluster string) {
			if err := s.hubClient.Create(t.Context(), &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + cluster, Name: "w"}}); err != nil {
				t.Fatal(err)
			}
		}, stays: true},
	}
	for name, test := range tests {
		c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{ID: name, SyncMode: clusterv1alpha1.Pull}}
		c.Annotations = map[string]string{
			libv1beta1.ShardAnnotation: "stepped", kube.AnnotationBootstrapToken: "abcdef",
			kube.AnnotationFirstUse: s.clock.Now().Add(test.firstUse).UTC().Format(time.RFC3339),
		}
		if err := karmada.CreateCluster(t.Context(), s.hubClient, c); err != nil {
			t.Fatal(err)
		}
		s.reconcile(t, name)
		test.use(name)
		s.reconcile(t, name)
	}
	check := func(wantAll bool) {
		t.Helper()
		for name, test := range tests {
			if test.alive {
				s.renewLease(t, name)
			}
			s.reconcile(t, name)
			c := s.getCluster(t, name)
			if stays := c != nil && c.DeletionTimestamp.IsZero(); stays != (wantAll || test.stays) {
				t.Errorf("%s: Cluster exists: got %t, want %t", name, stays, wantAll || test.stays)
			}
		}
	}
	s.clock.Step(14 * time.Minute)
	check(true)
	s.clock.Step(2 * time.Minute)
	check(false)
}

func TestStaleConfirmationOfAgentIsIgnored(t *testing.T) {
	t.Parallel()
	const name = "not-left"
	s := newManualController(t, sharedEnv(t))
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{ID: name, SyncMode: clusterv1alpha1.Pull}}
	c.Annotations = map[string]string{libv1beta1.ShardAnnotation: "stepped"}
	if err := karmada.CreateCluster(t.Context(), s.hubClient, c); err != nil {
		t.Fatal(err)
	}
	s.reconcile(t, name)
	s.renewLease(t, name)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + name, Name: name}}
	confirm := func() {
		t.Helper()
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"`+kube.AnnotationAgentRequest+`":"removed"}}}`))
		if err := s.hubClient.Patch(t.Context(), lease, patch); err != nil {
			t.Fatal(err)
		}
	}
	// The confirmation is from a backup.
	confirm()
	if err := s.hubClient.Delete(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		s.reconcile(t, name)
		if c := s.getCluster(t, name); c == nil || c.Annotations[kube.AnnotationAgentRequest] != kube.AgentRequestRemove {
			t.Fatalf("the removal of the agent is not requested: %v", c)
		}
	}
	confirm()
	s.reconcile(t, name)
	if s.getCluster(t, name) != nil {
		t.Error("the Cluster is not deleted")
	}
}

func TestRemovalIgnoresAnnotationsOfEarlierRemoval(t *testing.T) {
	t.Parallel()
	const name = "ordered"
	s := newManualController(t, sharedEnv(t))
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{ID: name, SyncMode: clusterv1alpha1.Pull}}
	c.Annotations = map[string]string{
		libv1beta1.ShardAnnotation: "stepped", kube.AnnotationAgentRequest: kube.AgentRequestRemove,
		kube.AnnotationDeregister: kube.DeregisterAbandon + "," + kube.DeregisterKeep,
	}
	if err := s.hubClient.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	s.reconcile(t, name)
	got := s.getCluster(t, name).Annotations
	if order, how := got[kube.AnnotationAgentRequest], got[kube.AnnotationDeregister]; order != "" || how != kube.DeregisterKeep {
		t.Errorf("annotations are %v", got)
	}
}
