package drift

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/go-logr/logr/funcr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	fakediscovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// newKindsWatchSet returns a watchSet of a cluster with n kinds, and the kinds in order.
func newKindsWatchSet(t *testing.T, n int, partitions *inventory.Partitions) (*watchSet, []schema.GroupVersionKind) {
	t.Helper()
	served := &metav1.APIResourceList{GroupVersion: "example.com/v1"}
	var kinds []schema.GroupVersionKind
	for i := range n {
		kind := fmt.Sprintf("Kind%04d", i)
		kinds = append(kinds, schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: kind})
		served.APIResources = append(served.APIResources, metav1.APIResource{Name: fmt.Sprintf("kinds%04d", i), Kind: kind, Verbs: metav1.Verbs{"list", "watch"}})
	}
	discoveryClient := &fakediscovery.FakeDiscovery{Fake: &clienttesting.Fake{Resources: []*metav1.APIResourceList{served}}}
	objects := metadatafake.NewSimpleMetadataClient(runtime.NewScheme())
	store := inventory.NewPartitionedStore(fake.NewClientset().CoreV1(), objects, "records", inventory.OwnerScope{}, partitions)
	w := newWatchSet(New(Options{Store: store, Metadata: objects, Mapper: kube.NewMapper(discoveryClient), Clock: clock.RealClock{}}))
	t.Cleanup(func() {
		w.stop()
		w.corrector.queue.ShutDown()
	})
	return w, kinds
}

// wantWatched checks the watched kinds.
func (w *watchSet) wantWatched(t *testing.T, want ...[]schema.GroupVersionKind) {
	t.Helper()
	watched := map[schema.GroupKind]bool{}
	for kind := range w.running {
		watched[kind.gk] = true
	}
	n := 0
	for _, part := range want {
		for _, gvk := range part {
			if !watched[gvk.GroupKind()] {
				t.Errorf("%s is not watched", gvk.Kind)
			}
		}
		n += len(part)
	}
	if n != len(watched) {
		t.Errorf("%d kinds are watched, want %d", len(watched), n)
	}
}

// TestWatchedKindsAreLimited has a record with more kinds than are watched. Watched ones stay, and the others follow in
// order when there is place for them.
func TestWatchedKindsAreLimited(t *testing.T) {
	t.Parallel()
	w, kinds := newKindsWatchSet(t, maxWatched+10, nil)
	logged := 0
	ctx := log.IntoContext(t.Context(), funcr.New(func(string, string) { logged++ }, funcr.Options{}))
	w.update(ctx, kinds[5:])
	w.wantWatched(t, kinds[5:5+maxWatched])
	w.update(ctx, kinds)
	w.update(ctx, kinds)
	w.wantWatched(t, kinds[5:5+maxWatched])
	if logged != 2 {
		t.Errorf("%d messages for 2 changes", logged)
	}
	w.update(ctx, append([]schema.GroupVersionKind{kinds[3]}, kinds[7:]...))
	w.wantWatched(t, kinds[3:4], kinds[7:7+maxWatched-1])
}

// failingDiscovery is the discovery of a cluster that does not answer.
type failingDiscovery struct {
	discovery.ServerResourcesInterface
}

func (failingDiscovery) ServerGroupsAndResources() ([]*metav1.APIGroup, []*metav1.APIResourceList, error) {
	return nil, nil, errors.New("no answer")
}

func TestWatchesContinueIfDiscoveryFails(t *testing.T) {
	t.Parallel()
	w, kinds := newKindsWatchSet(t, 3, nil)
	w.update(t.Context(), kinds)
	served := w.corrector.Mapper
	w.corrector.Mapper = kube.NewMapper(failingDiscovery{})
	w.update(t.Context(), kinds[1:])
	w.wantWatched(t, kinds[1:])
	w.corrector.Mapper = served
	removed := schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "NotServed"}
	w.update(t.Context(), []schema.GroupVersionKind{kinds[2], removed})
	w.wantWatched(t, kinds[2:])
}

func TestKindsOnTheHubClusterAreNotLimited(t *testing.T) {
	t.Parallel()
	w, kinds := newKindsWatchSet(t, maxWatched+10, &inventory.Partitions{})
	w.update(context.Background(), kinds)
	w.wantWatched(t, kinds)
}
