package fleet_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

func TestRemoveDeregistration(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		annotations, want map[string]string
		dropped           bool
	}{
		"none":         {nil, nil, false},
		"of others":    {map[string]string{"a": "b"}, map[string]string{"a": "b"}, false},
		"people's own": {map[string]string{kube.AnnotationDeregister: "keep-addons,force"}, map[string]string{kube.AnnotationDeregister: "keep-addons,force"}, false},
		"the hub's": {
			map[string]string{
				"a": "b", kube.AnnotationAgentRequest: "remove", kube.AnnotationDeadline: "x", kube.AnnotationLeftBehind: "[]",
				kube.AnnotationDeregister: "abandon,force",
			},
			map[string]string{"a": "b", kube.AnnotationDeregister: "force"}, true,
		},
		"nothing is left": {map[string]string{kube.AnnotationDeregister: "abandon"}, map[string]string{}, true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := &clusterv1alpha1.Cluster{}
			cluster.Annotations = tc.annotations
			if dropped := fleet.RemoveDeregistration(cluster); dropped != tc.dropped {
				t.Errorf("RemoveDeregistration() = %t, want %t", dropped, tc.dropped)
			}
			if diff := cmp.Diff(tc.want, cluster.Annotations); diff != "" {
				t.Errorf("annotations (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAddDeregisterOptions adds options as two clients that have read the same version of the cluster.
func TestAddDeregisterOptions(t *testing.T) {
	t.Parallel()
	cluster := &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "c", UID: "1", Annotations: map[string]string{kube.AnnotationDeregister: "keep-addons"}}}
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithObjects(cluster).Build()
	first, second := cluster.DeepCopy(), cluster.DeepCopy()
	for _, step := range []struct {
		cluster *clusterv1alpha1.Cluster
		options []string
		want    string
	}{
		{first, []string{kube.DeregisterForce}, "keep-addons,force"},
		{second, []string{kube.DeregisterAbandon, kube.DeregisterForce}, "keep-addons,force,abandon"},
		{first, []string{kube.DeregisterAbandon}, "keep-addons,force,abandon"},
	} {
		if err := fleet.AddDeregisterOptions(t.Context(), hub, step.cluster, step.options...); err != nil {
			t.Fatal(err)
		}
		live := &clusterv1alpha1.Cluster{}
		if err := hub.Get(t.Context(), client.ObjectKeyFromObject(cluster), live); err != nil {
			t.Fatal(err)
		}
		if got := live.Annotations[kube.AnnotationDeregister]; got != step.want {
			t.Errorf("got options %q, want %q", got, step.want)
		}
		if diff := cmp.Diff(live, step.cluster); diff != "" {
			t.Errorf("the cluster of the caller (-live +caller):\n%s", diff)
		}
	}
	recreated := cluster.DeepCopy()
	recreated.UID = "0"
	if err := fleet.AddDeregisterOptions(t.Context(), hub, recreated, kube.DeregisterForce); !apierrors.IsNotFound(err) {
		t.Errorf("got error %v for a cluster that was created again, want NotFound", err)
	}
}

// TestLongListOfRemainingObjectsIsTruncated reads the annotation with the list, which users can write.
func TestLongListOfRemainingObjectsIsTruncated(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 70<<10)
	for name, tc := range map[string]struct{ annotation, want string }{
		"one long entry":  {fmt.Sprintf("[%q]", long), `["more than can be listed here"]`},
		"two entries":     {fmt.Sprintf("[%q,%q]", long, "y"), `["more than can be listed here"]`},
		"three entries":   {fmt.Sprintf("[%q,%q,%q]", "a", "y", long), `["a","more than can be listed here"]`},
		"short ones only": {`["a","y"]`, `["a","y","new"]`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "c", Annotations: map[string]string{kube.AnnotationLeftBehind: tc.annotation}}}
			hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithObjects(cluster).Build()
			updated, err := fleet.RecordLeftBehind(t.Context(), hub, cluster, "new")
			if err != nil {
				t.Fatal(err)
			}
			if got := updated.Annotations[kube.AnnotationLeftBehind]; got != tc.want {
				t.Errorf("got %.100s, want %s", got, tc.want)
			}
		})
	}
}
