package fleet_test

import (
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	cachetesting "k8s.io/client-go/tools/cache/testing"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// BenchmarkObject reads clusters with 200 APIs from a cache.
func BenchmarkObject(b *testing.B) {
	object := metav1.ObjectMeta{Name: "one", Labels: map[string]string{"env": "prod"}, Annotations: map[string]string{"a": "b"}}
	sveltosCluster, cluster := &libv1beta1.SveltosCluster{ObjectMeta: object}, &clusterv1alpha1.Cluster{ObjectMeta: object}
	sveltosCluster.Namespace = "eu"
	served := clusterv1alpha1.APIEnablement{GroupVersion: "group/v1"}
	for i := range 200 {
		sveltosCluster.Status.APIVersions = append(sveltosCluster.Status.APIVersions, fmt.Sprint("group/v1/Kind", i))
		served.Resources = append(served.Resources, clusterv1alpha1.APIResource{Name: fmt.Sprint("kind", i), Kind: fmt.Sprint("Kind", i)})
	}
	cluster.Status.APIEnablements = []clusterv1alpha1.APIEnablement{served}
	for _, obj := range []client.Object{sveltosCluster, cluster} {
		member := fleet.FromObject(obj)
		hub := cacheOf(b, obj)
		b.Run(string(member.Type), func(b *testing.B) {
			for b.Loop() {
				if _, err := fleet.Object(b.Context(), hub, member.ID()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// cacheOf returns a cache with an object that declares a member.
func cacheOf(b *testing.B, obj client.Object) client.Reader {
	b.Helper()
	objects, mapper := cachetesting.NewFakeControllerSource(), meta.NewDefaultRESTMapper(nil)
	objects.Add(obj)
	mapper.Add(libv1beta1.GroupVersion.WithKind(libv1beta1.SveltosClusterKind), meta.RESTScopeNamespace)
	mapper.Add(clusterv1alpha1.GroupVersion.WithKind(clusterv1alpha1.ClusterKind), meta.RESTScopeRoot)
	hub, err := cache.New(&rest.Config{}, cache.Options{
		Scheme: kube.Scheme(), Mapper: mapper,
		NewInformer: func(_ toolscache.ListerWatcher, obj runtime.Object, resync time.Duration, indexers toolscache.Indexers) toolscache.SharedIndexInformer {
			return toolscache.NewSharedIndexInformer(objects, obj, resync, indexers)
		},
	})
	if err != nil {
		b.Fatal(err)
	}
	go func() { _ = hub.Start(b.Context()) }() // ends without an error
	if !hub.WaitForCacheSync(b.Context()) {
		b.Fatal("the cache is not started")
	}
	return hub
}
