package kube

import (
	"context"
	"net/http"

	"k8s.io/client-go/rest"
)

// Interruptible returns a copy of config whose reads are cancelled when ctx ends. This includes the discovery of API
// resources, for which clients take no context. Writes are not cancelled, since the server may have executed them.
// Reads that begin after the end of ctx belong to a rollback and are not cancelled.
func Interruptible(ctx context.Context, config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return interruptible{ctx: ctx, next: next} })
	return config
}

// ContextUntil returns a context that also ends when done is closed. A nil done is never closed. The caller must call
// the CancelFunc.
func ContextUntil(ctx context.Context, done <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-done:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// interruptible is a RoundTripper whose reads end with ctx.
type interruptible struct {
	ctx  context.Context //nolint:containedctx // the context of the command, to which all requests belong
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (i interruptible) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Method != http.MethodGet || i.ctx.Err() != nil {
		return i.next.RoundTrip(request)
	}
	bound, cancel := context.WithCancelCause(request.Context())
	// The function stays registered until the context of the request ends, after the response is read.
	stop := context.AfterFunc(i.ctx, func() { cancel(context.Cause(i.ctx)) }) //nolint:contextcheck // either context ends the request
	context.AfterFunc(request.Context(), func() { stop() })
	response, err := i.next.RoundTrip(request.WithContext(bound))
	if err != nil && context.Cause(bound) != nil {
		return nil, context.Cause(bound)
	}
	return response, err
}

// WrappedRoundTripper returns the next RoundTripper.
func (i interruptible) WrappedRoundTripper() http.RoundTripper { return i.next }
