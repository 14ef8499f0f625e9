package deliver

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// TestSharedContentIsCreatedOnce writes the same bundle for twenty members concurrently, to a hub that responds after
// one second.
func TestSharedContentIsCreatedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var creations atomic.Int32
		hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithInterceptorFuncs(interceptor.Funcs{
			Create: func(ctx context.Context, hub client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
				creations.Add(1)
				<-time.After(time.Second)
				return hub.Create(ctx, obj, opts...)
			},
		}).Build()
		transport, err := NewPullTransport(hub, hub, Key{1})
		if err != nil {
			t.Fatal(err)
		}
		var deliveries sync.WaitGroup
		for range 20 {
			deliveries.Go(func() {
				bundle := &libv1beta1.ConfigurationBundle{}
				bundle.Namespace, bundle.Name = kube.AgentNamespace, "shared"
				if err := transport.createContent(t.Context(), bundle); err != nil {
					t.Error(err)
				}
			})
		}
		deliveries.Wait()
		if got := creations.Load(); got != 1 {
			t.Errorf("got %d requests, want 1", got)
		}
	})
}

// TestCanceledDeliveryDoesNotCancelOthers cancels the first of two deliveries that write the same content.
func TestCanceledDeliveryDoesNotCancelOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithInterceptorFuncs(interceptor.Funcs{
			Create: func(ctx context.Context, hub client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
				select {
				case <-time.After(time.Second):
					return hub.Create(ctx, obj, opts...)
				case <-ctx.Done():
					return ctx.Err()
				}
			},
		}).Build()
		transport, err := NewPullTransport(hub, hub, Key{1})
		if err != nil {
			t.Fatal(err)
		}
		content := &libv1beta1.ConfigurationBundle{}
		content.Namespace, content.Name = kube.AgentNamespace, "shared"
		first, cancel := context.WithCancel(t.Context())
		var deliveries sync.WaitGroup
		deliveries.Go(func() { _ = transport.createContent(first, content.DeepCopy()) })
		synctest.Wait()
		deliveries.Go(func() {
			if err := transport.createContent(t.Context(), content.DeepCopy()); err != nil {
				t.Errorf("the second delivery: %v", err)
			}
		})
		synctest.Wait()
		cancel()
		deliveries.Wait()
	})
}
