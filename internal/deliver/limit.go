package deliver

import (
	"errors"
	"net/http"

	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/kube"
)

// maxResponse limits one response of the hub's API server in bytes. It is more than any object that etcd stores, and
// more than the list of all groups of a member.
const maxResponse = 64 << 20

// errTooLong is the error of a response that is longer than maxResponse.
var errTooLong = errors.New("the response of the hub is too long")

// LimitResponses returns a copy of config whose clients fail for responses longer than 64 MiB. Watches are not limited.
func LimitResponses(config *rest.Config) *rest.Config {
	limited := rest.CopyConfig(config)
	limited.Wrap(func(next http.RoundTripper) http.RoundTripper { return responseLimiter{next: next} })
	return limited
}

// responseLimiter is a RoundTripper that limits the bodies of responses.
type responseLimiter struct{ next http.RoundTripper }

// RoundTrip calls the next transport and limits the body of the response.
func (l responseLimiter) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := l.next.RoundTrip(request)
	if err == nil && response.Body != nil && request.URL.Query().Get("watch") == "" {
		response.Body = kube.LimitBody(response.Body, maxResponse, errTooLong)
	}
	return response, err
}

// WrappedRoundTripper returns the next transport, so that client-go can close its idle connections.
func (l responseLimiter) WrappedRoundTripper() http.RoundTripper { return l.next }
