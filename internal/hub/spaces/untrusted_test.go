package spaces_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

// cluster reads the Cluster of this name; nil if there is none.
func (w *world) cluster(t *testing.T, name string) *clusterv1alpha1.Cluster {
	t.Helper()
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name)}
	if !w.has(t, w.hubClient, c) {
		return nil
	}
	return c
}

func TestNoStatusAbandonsAClusterThatAnswers(t *testing.T) {
	t.Parallel()
	said := map[string]func(w *world, t *testing.T, name string){
		"false":   func(w *world, t *testing.T, name string) { w.report(t, name, metav1.ConditionFalse) },
		"unknown": func(w *world, t *testing.T, name string) { w.report(t, name, metav1.ConditionUnknown) },
		"cleared": func(w *world, t *testing.T, name string) {
			cleared := client.RawPatch("application/merge-patch+json", []byte(`{"status":null}`))
			if err := w.hubClient.Status().Patch(t.Context(), w.cluster(t, name), cleared); err != nil {
				t.Fatal(err)
			}
		},
	}
	for mode, prefix := range map[clusterv1alpha1.ClusterSyncMode]string{clusterv1alpha1.Push: "push-says-", clusterv1alpha1.Pull: "pull-says-"} {
		for what, say := range said {
			name := prefix + what
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := newStepped(t, planes(t))
				s.controller.Config = func(context.Context, fleet.Member) (*rest.Config, error) { return s.member.Config, nil }
				work := s.leaves(t, name, mode)
				say(s.world, t, name)
				for range 5 {
					s.clock.Step(5 * time.Second)
					if mode == clusterv1alpha1.Pull {
						s.beat(t, name)
					}
					s.step(t, name)
				}
				c := s.cluster(t, name)
				if c == nil || fleet.FromCluster(c).Abandoned || fleet.FromCluster(c).Forced || len(s.forgotten) > 0 {
					t.Errorf("the Cluster is given up: %+v", c)
				}
				if !s.has(t, s.hubClient, work) {
					t.Error("the Work is let go of")
				}
			})
		}
	}
}

func TestAnAbandonedRegistrationGoes(t *testing.T) {
	t.Parallel()
	s := newStepped(t, planes(t))
	// A hub that is restored has Clusters of today that were approved long ago, and no heartbeats.
	approved := map[string]time.Duration{"approved-now": 0, "approved-before-a-restore": -7 * 24 * time.Hour, "approved-later": time.Hour}
	for name, after := range approved {
		c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{ID: name, SyncMode: clusterv1alpha1.Pull}}
		c.Annotations = map[string]string{
			libv1beta1.ShardAnnotation: "stepped", kube.AnnotationBootstrapToken: "abcdef",
			kube.AnnotationApproved: s.clock.Now().Add(after).UTC().Format(time.RFC3339),
		}
		if err := karmada.Enroll(t.Context(), s.hubClient, c); err != nil {
			t.Fatal(err)
		}
		s.step(t, name)
	}
	stays := func() []string {
		var names []string
		for _, name := range []string{"approved-before-a-restore", "approved-later", "approved-now"} {
			s.step(t, name)
			if c := s.cluster(t, name); c != nil && c.DeletionTimestamp.IsZero() {
				names = append(names, name)
			}
		}
		return names
	}
	s.clock.Step(14 * time.Minute)
	if diff := cmp.Diff([]string{"approved-before-a-restore", "approved-later", "approved-now"}, stays()); diff != "" {
		t.Errorf("after 14 minutes (-want +got):\n%s", diff)
	}
	s.clock.Step(2 * time.Minute)
	if diff := cmp.Diff([]string{"approved-later"}, stays()); diff != "" {
		t.Errorf("after 16 minutes (-want +got):\n%s", diff)
	}
}

func TestAnAgentThatHasNotLeftIsOrderedTo(t *testing.T) {
	t.Parallel()
	const name = "not-left"
	s := newStepped(t, planes(t))
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{ID: name, SyncMode: clusterv1alpha1.Pull}}
	c.Annotations = map[string]string{libv1beta1.ShardAnnotation: "stepped"}
	if err := karmada.Enroll(t.Context(), s.hubClient, c); err != nil {
		t.Fatal(err)
	}
	s.step(t, name)
	s.beat(t, name)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + name, Name: name}}
	answer := func() {
		t.Helper()
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"`+kube.AnnotationAgentOrder+`":"removed"}}}`))
		if err := s.hubClient.Patch(t.Context(), lease, patch); err != nil {
			t.Fatal(err)
		}
	}
	// It is from a backup.
	answer()
	if err := s.hubClient.Delete(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		s.step(t, name)
		if c := s.cluster(t, name); c == nil || c.Annotations[kube.AnnotationAgentOrder] != kube.AgentOrderRemove {
			t.Fatalf("the agent is not ordered to remove itself: %v", c)
		}
	}
	answer()
	s.step(t, name)
	if s.cluster(t, name) != nil {
		t.Error("the Cluster is not gone")
	}
}

func TestARemovalBeginsWithoutOrdersOfAnEarlierOne(t *testing.T) {
	t.Parallel()
	const name = "ordered"
	s := newStepped(t, planes(t))
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{ID: name, SyncMode: clusterv1alpha1.Pull}}
	c.Annotations = map[string]string{
		libv1beta1.ShardAnnotation: "stepped", kube.AnnotationAgentOrder: kube.AgentOrderRemove,
		kube.AnnotationDeregister: kube.DeregisterAbandon + "," + kube.DeregisterKeep,
	}
	if err := s.hubClient.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	s.step(t, name)
	got := s.cluster(t, name).Annotations
	if order, how := got[kube.AnnotationAgentOrder], got[kube.AnnotationDeregister]; order != "" || how != kube.DeregisterKeep {
		t.Errorf("annotations are %v", got)
	}
}
