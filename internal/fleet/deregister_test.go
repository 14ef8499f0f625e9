package fleet_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

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
				"a": "b", kube.AnnotationAgentOrder: "remove", kube.AnnotationDeadline: "x", kube.AnnotationLeftBehind: "[]",
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
