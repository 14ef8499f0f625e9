package unclaimed

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// TestClusterOfLeaseIsFoundByIndex has clusters of both kinds, and a push cluster in the namespace of a pull cluster.
func TestClusterOfLeaseIsFoundByIndex(t *testing.T) {
	t.Parallel()
	sveltosCluster := func(name string, isPull bool) *libv1beta1.SveltosCluster {
		return &libv1beta1.SveltosCluster{
			ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Spec: libv1beta1.SveltosClusterSpec{PullMode: isPull},
		}
	}
	cluster := func(name string) *clusterv1alpha1.Cluster {
		return &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull}}
	}
	builder := fake.NewClientBuilder().WithScheme(kube.Scheme()).
		WithObjects(sveltosCluster("one", true), sveltosCluster("pushed", false), cluster("eu-1"), cluster("eu-2")).
		WithInterceptorFuncs(interceptor.Funcs{
			List: func(ctx context.Context, hub client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
				if (&client.ListOptions{}).ApplyOptions(opts).FieldSelector == nil {
					return errors.New("the list has all clusters")
				}
				return hub.List(ctx, list, opts...)
			},
		})
	for _, kind := range fleet.NewObjects() {
		builder = builder.WithIndex(kind, deliveryIndex, deliveryNamespaceOf)
	}
	c := &Controller{Hub: builder.Build()}
	for namespace, want := range map[string][]fleet.ID{
		"fleet":                      {{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one"}},
		fleet.ExecutionSpace("eu-2"): {{Type: fleet.TypeKarmada, Namespace: fleet.ExecutionSpace("eu-2"), Name: "eu-2"}},
		"other":                      {},
	} {
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "one"}}
		if diff := cmp.Diff(want, c.clustersOfLease(t.Context(), lease)); diff != "" {
			t.Errorf("clusters of a Lease in %s (-want +got):\n%s", namespace, diff)
		}
	}
}
