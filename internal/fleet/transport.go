package fleet

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/kube"
)

// These are the values of client-go, whose transport supports neither an egress policy nor proxy headers.
const (
	dialTimeout      = 30 * time.Second
	handshakeTimeout = 10 * time.Second
	maxIdlePerHost   = 25
)

const (
	// maxErrorBody limits the body of an error response, in bytes. API servers send less than a KiB.
	maxErrorBody = 1 << 20
	// maxResponse limits the body of all other responses but watches, in bytes after decompression: a cluster can send
	// zeros without end. The longest response is a page of 500 objects.
	maxResponse = 256 << 20
	// maxValues limits the JSON values in such a response, which take much more memory than text: 256 MiB of empty
	// objects would take 5 GiB. A page of 500 large CustomResourceDefinitions has about two million.
	maxValues = 4_000_000
)

// errTooLong is the error of a response that is longer than maxResponse, or has more than maxValues.
var errTooLong = fmt.Errorf("the cluster returned more than %d MiB or %d values", maxResponse>>20, maxValues)

// LimitConnections replaces the transport of config with a transport that applies the egress policy, limits the sizes
// of responses, and hides errors that are not from an API server. Copies of config share the transport.
func (c *Clients) LimitConnections(config *rest.Config) error { return c.setTransport(config, nil) }

// setTransport is LimitConnections with headers for the proxy of config. It does not set Dial in config, for which
// client-go would create a transport per client.
func (c *Clients) setTransport(config *rest.Config, proxyHeader http.Header) error {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return fmt.Errorf("load the certificates for the member: %w", err)
	}
	if tlsConfig == nil {
		tlsConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	transport := &http.Transport{
		Proxy:               config.Proxy,
		ProxyConnectHeader:  proxyHeader,
		TLSClientConfig:     tlsConfig,
		TLSHandshakeTimeout: handshakeTimeout,
		MaxIdleConnsPerHost: maxIdlePerHost,
	}
	prefix := ""
	if server, _, err := rest.DefaultServerUrlFor(config); err == nil {
		prefix = strings.TrimSuffix(server.Path, "/")
	}
	limited := c.egress.Transport(utilnet.SetTransportDefaults(transport), &net.Dialer{Timeout: dialTimeout, KeepAlive: dialTimeout})
	config.TLSClientConfig, config.Proxy = rest.TLSClientConfig{}, nil
	config.Transport = statusTransport{Transport: limited, prefix: prefix}
	return nil
}

// statusTransport replaces the body of an error response unless the body is a Status of Kubernetes. client-go makes the
// body a part of the error, and the hub writes the error to the status of the cluster. Otherwise a user could read the
// responses of internal servers by registering their addresses as clusters, or by a cluster that redirects to them.
type statusTransport struct {
	egress.Transport
	// prefix is the path of the API server's URL.
	prefix string
}

// RoundTrip implements http.RoundTripper.
func (t statusTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := t.Transport.RoundTrip(withoutProtobuf(request))
	if err != nil {
		return response, err
	}
	if response.Header.Get("Location") != "" && response.StatusCode/100 == 3 {
		response.Body.Close()
		return nil, fmt.Errorf("the server answered %d %s: it redirects, which API servers do not; use the address to which it redirects", response.StatusCode, http.StatusText(response.StatusCode))
	}
	if response.StatusCode < http.StatusBadRequest {
		if request.URL.Query().Get("watch") == "" && response.StatusCode != http.StatusSwitchingProtocols {
			response.Body = kube.NewBudget(maxResponse, maxValues, errTooLong).Limit(response.Body)
			if isObjectPath(strings.TrimPrefix(request.URL.Path, t.prefix)) {
				response.Body = kube.RequireObject(response.Body)
				// As YAML, which client-go would decode too, the same body can be another object.
				response.Header.Set("Content-Type", runtime.ContentTypeJSON)
			}
		}
		return response, nil
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, maxErrorBody))
	response.Body.Close()
	if err != nil {
		return nil, err
	}
	if !isStatus(body) && !isHealthRequest(request) {
		body = fmt.Appendf(nil, "the server answered %d %s, without a Status of Kubernetes", response.StatusCode, http.StatusText(response.StatusCode))
	}
	response.Body, response.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return response, nil
}

// withoutProtobuf returns request with an Accept header without Protobuf, which clients of metadata prefer: maxValues
// limits the values of JSON only. A kube.Budget refuses responses that are Protobuf nevertheless.
func withoutProtobuf(request *http.Request) *http.Request {
	accept := request.Header.Get("Accept")
	if !strings.Contains(accept, runtime.ContentTypeProtobuf) {
		return request
	}
	var others []string
	for mediaType := range strings.SplitSeq(accept, ",") {
		if !strings.Contains(mediaType, runtime.ContentTypeProtobuf) {
			others = append(others, mediaType)
		}
	}
	if len(others) == 0 {
		others = []string{runtime.ContentTypeJSON}
	}
	changed := request.Clone(request.Context())
	changed.Header.Set("Accept", strings.Join(others, ","))
	return changed
}

// isStatus returns whether the body of a response is a Status of Kubernetes, in JSON or in Protobuf.
func isStatus(body []byte) bool {
	var kind struct{ Kind, APIVersion string }
	if json.Unmarshal(body, &kind) == nil {
		return kind.Kind == "Status" && kind.APIVersion == "v1"
	}
	return bytes.HasPrefix(body, []byte("k8s\x00"))
}

// The paths of objects and lists of an API server, and of the logs of pods, which are text.
var (
	objectPaths = regexp.MustCompile(`^(/api/v1|/apis/[^/]+/[^/]+)/.`)
	podLogs     = regexp.MustCompile(`^/api/v1/namespaces/[^/]+/pods/[^/]+/log$`)
)

// isObjectPath returns whether the response to a request for a path of an API server is an object or a list of objects.
func isObjectPath(path string) bool {
	return objectPaths.MatchString(path) && !podLogs.MatchString(path)
}

// isHealthRequest returns whether a request is for the health of an API server. The response is text, from which
// package survey reports only the names of failed checks.
func isHealthRequest(request *http.Request) bool {
	return strings.HasSuffix(request.URL.Path, "/readyz") || strings.HasSuffix(request.URL.Path, "/healthz")
}
