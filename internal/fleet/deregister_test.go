package fleet_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
				t.Errorf("DropDepartureOrders() = %t, want %t", dropped, tc.dropped)
			}
			if diff := cmp.Diff(tc.want, cluster.Annotations); diff != "" {
				t.Errorf("annotations (-want +got):\n%s", diff)
			}
		})
	}
}

// TestLongListOfLeftBehindIsTruncated: users can write the annotation with the list.
func TestLongListOfLeftBehindIsTruncated(t *testing.T) {
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
