package register

import (
	"context"
	"net/http"

	"k8s.io/client-go/rest"
)

// Interruptible returns config with which reads end when ctx ends, also those for which a client takes no context: it
// lists the kinds of its cluster first. Writes are not cut off, since they may have been executed. Reads that begin
// after the end of ctx are those of a rollback and are not cut off either.
func Interruptible(ctx context.Context, config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return interruptible{ctx: ctx, next: next} })
	return config
}

// interruptible is a RoundTripper whose reads end with ctx.
type interruptible struct {
	ctx  context.Context //nolint:containedctx // it is that of the command, which all its requests belong to
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (i interruptible) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Method != http.MethodGet || i.ctx.Err() != nil {
		return i.next.RoundTrip(request)
	}
	bound, cancel := context.WithCancelCause(request.Context())
	// It is needed until the response is read, which is when the context of the request ends.
	stop := context.AfterFunc(i.ctx, func() { cancel(context.Cause(i.ctx)) }) //nolint:contextcheck // there are two, and one is done
	context.AfterFunc(request.Context(), func() { stop() })
	response, err := i.next.RoundTrip(request.WithContext(bound))
	if err != nil && context.Cause(bound) != nil {
		return nil, context.Cause(bound)
	}
	return response, err
}

// WrappedRoundTripper returns the next RoundTripper.
func (i interruptible) WrappedRoundTripper() http.RoundTripper { return i.next }
