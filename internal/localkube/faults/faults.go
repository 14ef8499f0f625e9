// Package faults lets requests of tests fail.
package faults

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"

	"k8s.io/client-go/rest"
)

// ErrConnection is the error of a request that Refuse or LoseResponse lets fail.
var ErrConnection = errors.New("the line is cut")

// Effect is applied to a request instead of sending it with next.
type Effect func(request *http.Request, next http.RoundTripper) (*http.Response, error)

// Fault lets one write request fail.
type Fault struct {
	// At is the number of the write request, from one.
	At     int64
	Effect Effect
	seen   atomic.Int64
}

// On returns config with the fault.
func (f *Fault) On(config *rest.Config) *rest.Config {
	return Wrap(config, func(request *http.Request, next http.RoundTripper) (*http.Response, error) {
		if request.Method != http.MethodGet && f.seen.Add(1) == f.At {
			return f.Effect(request, next)
		}
		return next.RoundTrip(request)
	})
}

// Seen returns the number of write requests so far.
func (f *Fault) Seen() int64 { return f.seen.Load() }

// Wrap returns config with an effect on each request.
func Wrap(config *rest.Config, effect Effect) *rest.Config {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return RoundTripper(func(request *http.Request) (*http.Response, error) { return effect(request, next) })
	})
	return config
}

// RoundTripper is a function that implements http.RoundTripper.
type RoundTripper func(*http.Request) (*http.Response, error)

// RoundTrip calls the function.
func (f RoundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

// Refuse does not send the request.
func Refuse(*http.Request, http.RoundTripper) (*http.Response, error) { return nil, ErrConnection }

// LoseResponse sends the request, and loses the response.
func LoseResponse(request *http.Request, next http.RoundTripper) (*http.Response, error) {
	if response, err := next.RoundTrip(request); err == nil {
		response.Body.Close()
	}
	return nil, ErrConnection
}

// Forbid answers as an API server for which the user has no permission.
func Forbid(request *http.Request, _ http.RoundTripper) (*http.Response, error) {
	body := `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"not you","reason":"Forbidden","code":403}`
	return &http.Response{
		StatusCode: http.StatusForbidden, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)),
		Request: request, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}, nil
}

// Interrupt calls cancel, and then sends the request.
func Interrupt(cancel func()) Effect {
	return func(request *http.Request, next http.RoundTripper) (*http.Response, error) {
		cancel()
		return next.RoundTrip(request)
	}
}

// HideAdmissionPolicies sends a request to an API server that seems to have no ValidatingAdmissionPolicies, as those
// before Kubernetes 1.30.
func HideAdmissionPolicies(request *http.Request, next http.RoundTripper) (*http.Response, error) {
	request = request.Clone(request.Context())
	switch request.URL.Path {
	case "/apis":
		request.Header.Set("Accept", "application/json") // the groups without their resources
	case "/apis/admissionregistration.k8s.io/v1":
		request.URL.Path = "/apis/admissionregistration.k8s.io/v0"
	}
	return next.RoundTrip(request)
}
