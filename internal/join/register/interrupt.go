package register

import (
	"context"
	"net/http"

	"k8s.io/client-go/rest"
)

// Interruptible returns config with which no client waits for an answer to a read when ctx ends: clients list the kinds
// of their cluster first, for which they take no context. Writes end by themselves, since they may have done their
// work; and reads that begin after the end of ctx are those of taking back, and go on.
func Interruptible(ctx context.Context, config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return interruptible{ctx: ctx, next: next} })
	return config
}

// interruptible sends requests that are cut off with ctx.
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
	// Until the answer is read, which is when the context of the request ends.
	stop := context.AfterFunc(i.ctx, func() { cancel(context.Cause(i.ctx)) }) //nolint:contextcheck // there are two, and one is done
	context.AfterFunc(request.Context(), func() { stop() })
	answer, err := i.next.RoundTrip(request.WithContext(bound))
	if err != nil && context.Cause(bound) != nil {
		return nil, context.Cause(bound)
	}
	return answer, err
}

// WrappedRoundTripper returns the one that sends the requests.
func (i interruptible) WrappedRoundTripper() http.RoundTripper { return i.next }
