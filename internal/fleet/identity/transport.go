package identity

import (
	"net/http"
	"net/url"

	clienttransport "k8s.io/client-go/transport"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// Wrap returns the wrapper of a new Source for w. It is a fleet.NewIdentityWrapper.
func Wrap(w *libv1beta1.WorkloadIdentity, endpoint *url.URL, isUnverified bool) (clienttransport.WrapperFunc, error) {
	source, err := New(w, Options{VerifyEndpoint: isUnverified})
	if err != nil {
		return nil, err
	}
	return source.Wrap(endpoint), nil
}

// Wrap returns a function that wraps a transport. The transport adds the Source's token to each request to endpoint,
// and to no other request, for example after a redirect. Requests fail if there is no token.
func (s *Source) Wrap(endpoint *url.URL) func(http.RoundTripper) http.RoundTripper {
	return func(next http.RoundTripper) http.RoundTripper {
		return &transport{source: s, host: endpoint.Host, next: next}
	}
}

type transport struct {
	source *Source
	host   string
	next   http.RoundTripper
}

// RoundTrip sends the request with a token.
func (t *transport) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.URL.Scheme != "https" || request.URL.Host != t.host {
		return t.next.RoundTrip(request)
	}
	token, err := t.source.Token(request.Context())
	if err != nil {
		if request.Body != nil {
			request.Body.Close()
		}
		return nil, err
	}
	request = request.Clone(request.Context())
	request.Header.Set("Authorization", "Bearer "+token)
	response, err := t.next.RoundTrip(request)
	if err == nil && response.StatusCode == http.StatusUnauthorized {
		t.source.discard(token)
	}
	return response, err
}

// WrappedRoundTripper returns the wrapped transport, as client-go's transport utilities expect.
func (t *transport) WrappedRoundTripper() http.RoundTripper { return t.next }
