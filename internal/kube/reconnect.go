package kube

import (
	"context"
	"errors"
	"net"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

const (
	// AgentReconnectInterval is the interval of RetryConnection for agents. A thousand agents make about 130 attempts per
	// second.
	AgentReconnectInterval = 5 * time.Second
	// apiServerStartup is the time for which an API server that is reachable again may return the errors of a starting
	// one.
	apiServerStartup = time.Minute
)

// WatchBackoff returns the backoff of a watch after responses with an error. With the jitter a delay is at most 10 s.
// While there is no connection, and while the API server starts, RetryConnection retries instead.
func WatchBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: 300 * time.Millisecond, Cap: 5 * time.Second, Steps: 6, Factor: 2, Jitter: 1}
}

// IsUnreachable returns whether a request failed because there is no connection to the API server.
func IsUnreachable(err error) bool {
	_, isNetwork := errors.AsType[*net.OpError](err)
	return isNetwork || utilnet.IsProbableEOF(err) || utilnet.IsTimeout(err) || utilnet.IsHTTP2ConnectionLost(err)
}

// IsUnavailable returns whether a request failed because there is no connection, or with an error that an API server
// returns while it starts: before it has read its objects, it can reject a valid credential, or forbid an allowed
// request.
func IsUnavailable(err error) bool {
	if IsUnreachable(err) {
		return true
	}
	for _, isStartError := range []func(error) bool{
		apierrors.IsServiceUnavailable, apierrors.IsTooManyRequests, apierrors.IsInternalError, apierrors.IsServerTimeout,
		apierrors.IsTimeout, apierrors.IsForbidden, apierrors.IsUnauthorized,
	} {
		if isStartError(err) {
			return true
		}
	}
	return false
}

// RetryConnection wraps lw: while the API server is unreachable, and while it then starts, a request is retried. The
// delay grows to interval, plus a random part of it, so all clients of a recovered API server connect within twice the
// interval. They continue their watches, because the reflector gets no error: after an error it would list all objects
// again, with a backoff that may have grown. Each attempt is one connection.
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

// retryConnection calls request until it succeeds, fails with an error that is not due to an outage, or ctx ends.
func retryConnection[T any](ctx context.Context, interval time.Duration, request func() (T, error)) (T, error) {
	newBackoff := func() *wait.Backoff {
		return &wait.Backoff{Duration: interval / 16, Cap: interval, Steps: 6, Factor: 2, Jitter: 1}
	}
	backoff, isOutage := newBackoff(), false
	var reached time.Time // by the first request after the outage
	for {
		result, err := request()
		switch {
		case IsUnreachable(err):
			isOutage, reached = true, time.Time{}
		case !isOutage || !IsUnavailable(err):
			return result, err
		case reached.IsZero():
			reached, backoff = time.Now(), newBackoff()
		case time.Since(reached) > apiServerStartup:
			return result, err
		}
		select {
		case <-ctx.Done():
			return result, err
		case <-time.After(backoff.Step()):
		}
	}
}
