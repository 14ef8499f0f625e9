package deliver

import (
	"errors"
	"io"
	"net/http"

	"k8s.io/client-go/rest"
)

// maxResponse is the most bytes read of one answer of the hub's API server: more than any object that etcd stores, and more than the
// list of all groups of a member.
const maxResponse = 64 << 20

// errTooLong is the error of reading an answer that is longer than maxResponse.
var errTooLong = errors.New("answer of the hub is too long")

// LimitResponses returns a copy of config whose clients read no answer longer than 64 MiB, however long the server makes it.
// Watches are streams without an end and are not limited.
func LimitResponses(config *rest.Config) *rest.Config {
	limited := rest.CopyConfig(config)
	limited.Wrap(func(next http.RoundTripper) http.RoundTripper { return limiter{next: next} })
	return limited
}

type limiter struct{ next http.RoundTripper }

// RoundTrip does what the next transport does, with a limit on the body.
func (l limiter) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := l.next.RoundTrip(request)
	if err == nil && response.Body != nil && request.URL.Query().Get("watch") == "" {
		response.Body = &limitedBody{body: response.Body, left: maxResponse}
	}
	return response, err
}

// WrappedRoundTripper lets client-go find the transport below, which closes idle connections.
func (l limiter) WrappedRoundTripper() http.RoundTripper { return l.next }

type limitedBody struct {
	body io.ReadCloser
	left int64
}

// Read returns errTooLong once more than the limit was there to be read.
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
