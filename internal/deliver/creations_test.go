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

// TestSharedContentIsCreatedOnce writes the same bundle for twenty members at the same time, on a hub that takes a
// second to answer.
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
				if err := transport.write(t.Context(), bundle); err != nil {
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
