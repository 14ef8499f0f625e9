package deliver

import (
	"errors"
	"io"
	"net/http"

	"k8s.io/client-go/rest"
)

// maxResponse limits one response of the hub's API server in bytes. It is more than any object that etcd stores, and
// more than the list of all groups of a member.
const maxResponse = 64 << 20

// errTooLong is the error of a response that is longer than maxResponse.
var errTooLong = errors.New("the response of the hub is too long")

// LimitResponses returns a copy of config whose clients fail for responses longer than 64 MiB. Watches are not limited.
func LimitResponses(config *rest.Config) *rest.Config {
	limited := rest.CopyConfig(config)
	limited.Wrap(func(next http.RoundTripper) http.RoundTripper { return limiter{next: next} })
	return limited
}

type limiter struct{ next http.RoundTripper }

// RoundTrip calls the next transport and limits the body of the response.
func (l limiter) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := l.next.RoundTrip(request)
	if err == nil && response.Body != nil && request.URL.Query().Get("watch") == "" {
		response.Body = &limitedBody{body: response.Body, left: maxResponse}
	}
	return response, err
}

// WrappedRoundTripper returns the next transport, so that client-go can close its idle connections.
func (l limiter) WrappedRoundTripper() http.RoundTripper { return l.next }

type limitedBody struct {
	body io.ReadCloser
	left int64
}

// Read returns errTooLong if the body is longer than the limit.
func (b *limitedBody) Read(p []byte) (int, error) {
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.body.Read(p)
	if int64(n) > b.left {
		return int(b.left), errTooLong
	}
	b.left -= int64(n)
	return n, err
}

// Close closes the body.
func (b *limitedBody) Close() error { return b.body.Close() }
