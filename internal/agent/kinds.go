package agent

import (
	"context"
	"sync"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/towline/towline/internal/agent/session"
)

// watchKinds requests a look at the served APIs when a CustomResourceDefinition or an APIService of the member changes,
// until ctx ends.
func (s *self) watchKinds(ctx context.Context) {
	// A member that does not answer is logged by watch.
	ctx = klog.NewContext(ctx, logr.Discard())
	var all sync.WaitGroup
	defer all.Wait()
	for _, resource := range []schema.GroupVersionResource{
		{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"},
		{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"},
	} {
		definitions := s.objects.Resource(resource)
		source := &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
				return definitions.List(ctx, options)
			},
			WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
				return definitions.Watch(ctx, options)
			},
		}
		all.Go(func() {
			cache.NewReflectorWithOptions(
				cache.ToListWatcherWithWatchListSemantics(source, s.objects), &metav1.PartialObjectMetadata{}, kindsListener(s.kindsChanged),
				cache.ReflectorOptions{Name: resource.Resource, TypeDescription: resource.String(), Backoff: session.Redial()},
			).RunWithContext(ctx)
		})
	}
}

// kindsListener is a reflector's store that keeps nothing, and is called for every change.
type kindsListener func()

var _ cache.TransformingStore = kindsListener(nil)

// Add reports a new definition.
func (l kindsListener) Add(any) error { return l.changed() }

// Update reports a changed definition.
func (l kindsListener) Update(any) error { return l.changed() }

// Delete reports a deleted definition.
func (l kindsListener) Delete(any) error { return l.changed() }

// Replace reports that definitions may have changed while they were not watched.
func (l kindsListener) Replace([]any, string) error { return l.changed() }

// Resync does nothing.
func (kindsListener) Resync() error { return nil }

// Transformer drops the metadata that the reflector would keep while it collects the first list.
func (kindsListener) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		if definition, ok := obj.(*metav1.PartialObjectMetadata); ok {
			definition.Annotations, definition.Labels, definition.ManagedFields = nil, nil, nil
		}
		return obj, nil
	}
}

func (l kindsListener) changed() error {
	l()
	return nil
}
