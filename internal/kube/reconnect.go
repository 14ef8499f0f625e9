package kube

import (
	"context"
	"errors"
	"net"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// AgentReconnectInterval is the interval of RetryConnection for agents. A thousand agents make about 130 attempts per
// second.
const AgentReconnectInterval = 5 * time.Second

// WatchBackoff returns the backoff of a watch after responses with an error. While there is no connection,
// RetryConnection retries instead.
func WatchBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: 300 * time.Millisecond, Cap: 8 * time.Second, Steps: 6, Factor: 2, Jitter: 1}
}

// RetryConnection wraps lw: while the API server cannot be reached, a request is repeated after a delay that grows to
// interval, plus a random part of it. So all clients of a recovered API server connect within twice the interval, and
// their backoff for errors that it returns while it starts, for example Forbidden, begins at its first step. An attempt
// is one connection.
func RetryConnection(lw cache.ListerWatcher, interval time.Duration) *cache.ListWatch {
	inner := cache.ToListerWatcherWithContext(lw)
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			return retryConnection(ctx, interval, func() (runtime.Object, error) { return inner.ListWithContext(ctx, opts) })
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			return retryConnection(ctx, interval, func() (watch.Interface, error) { return inner.WatchWithContext(ctx, opts) })
		},
	}
}

// retryConnection calls request until it gets a connection or ctx ends.
func retryConnection[T any](ctx context.Context, interval time.Duration, request func() (T, error)) (T, error) {
	pause := wait.Backoff{Duration: interval / 16, Cap: interval, Steps: 6, Factor: 2, Jitter: 1}
	for {
		result, err := request()
		if _, isUnreachable := errors.AsType[*net.OpError](err); !isUnreachable {
			return result, err
		}
		select {
		case <-ctx.Done():
			return result, err
		case <-time.After(pause.Step()):
		}
	}
}
