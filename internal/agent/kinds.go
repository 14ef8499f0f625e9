package agent

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

// watchKinds requests a read of the facts when a CustomResourceDefinition or an APIService of the member changes, until
// ctx ends.
func (f *clusterFacts) watchKinds(ctx context.Context) {
	logger := log.FromContext(ctx)
	// The reflectors log nothing, because clusterFacts.run logs a member that does not answer.
	ctx = klog.NewContext(ctx, logr.Discard())
	var goroutines sync.WaitGroup
	defer goroutines.Wait()
	for _, resource := range []schema.GroupVersionResource{
		{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"},
		{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"},
	} {
		definitions := f.metadataClient.Resource(resource)
		forbidden := &forbiddenLog{logger: logger.WithValues("resource", resource.GroupResource().String())}
		source := &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
				list, err := definitions.List(ctx, options)
				forbidden.logIfForbidden(err)
				return list, err
			},
			WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
				events, err := definitions.Watch(ctx, options)
				forbidden.logIfForbidden(err)
				return events, err
			},
		}
		goroutines.Go(func() {
			cache.NewReflectorWithOptions(
				cache.ToListWatcherWithWatchListSemantics(source, f.metadataClient), &metav1.PartialObjectMetadata{}, kindsListener(f.requestRead),
				cache.ReflectorOptions{Name: resource.Resource, TypeDescription: resource.String(), Backoff: kube.WatchBackoff()},
			).RunWithContext(ctx)
		})
	}
}

// forbiddenLog logs the first forbidden request of a watch.
type forbiddenLog struct {
	logger logr.Logger
	once   sync.Once
}

func (f *forbiddenLog) logIfForbidden(err error) {
	if apierrors.IsForbidden(err) {
		f.once.Do(func() {
			f.logger.Info("cannot watch definitions of kinds; changes are detected within ten minutes", logkeys.Reason, err.Error())
		})
	}
}

// kindsBackoff limits how often the agent reads the served APIs while definitions change all the time, for example
// because two controllers overwrite each other's caBundle.
type kindsBackoff struct {
	backoff wait.Backoff
	// lastRead is the time of the last read of the served APIs.
	lastRead time.Time
}

// delay returns the time from a change of definitions, which was detected now, to the next read. The first delay is
// minKindsDelay. It doubles with each call, up to maxKindsDelay, and begins again after maxKindsDelay without a read.
func (b *kindsBackoff) delay(now time.Time) time.Duration {
	if b.backoff.Duration == 0 || now.Sub(b.lastRead) > maxKindsDelay {
		b.backoff = wait.Backoff{Duration: minKindsDelay, Factor: 2, Cap: maxKindsDelay, Steps: math.MaxInt32}
	}
	return b.backoff.Step()
}

// kindsListener is a reflector's store that stores nothing, and calls a function for every change.
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

// Transformer drops labels, annotations and managed fields, which the reflector keeps in memory until the first list is
// complete.
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
