package fleet

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/kube"
)

// These values are the same as in client-go, whose transport supports neither an egress policy nor proxy headers.
const (
	dialTimeout      = 30 * time.Second
	handshakeTimeout = 10 * time.Second
	maxIdlePerHost   = 25
)

// maxErrorBody limits the body of an error response, in bytes. API servers send less than a KiB.
const maxErrorBody = 1 << 20

// maxHeader limits the headers of a response, in bytes. API servers send less than a KiB.
const maxHeader = 256 << 10

// minMemory is the lower limit of both results of newMemory, in bytes. maxMemory is the upper limit of the memory for
// responses.
const (
	minMemory = 256 << 20
	maxMemory = 1 << 30
)

// newMemory returns the memory for the responses of all members, and the memory for their records and counters.
// hub.Run sets the memory limit of the process to half of the container's memory. Each result is a quarter of that
// limit. If the process has no limit, records are not limited. SetMemoryLimit(-1) only returns the limit.
func newMemory() (responses, records *kube.ResponseMemory) {
	quarter := max(minMemory, debug.SetMemoryLimit(-1)/4)
	return kube.NewResponseMemory(min(maxMemory, quarter)), kube.NewResponseMemory(quarter)
}

// uncountedRecordMemory is the size of the first part of each Reservation of ReserveRecordMemory, in bytes, which does
// not count against the limit. The records of 6,000 objects need about as much.
const uncountedRecordMemory = 8 << 20

// ReserveRecordMemory returns an empty Reservation for the records of a member. The caller must resize and close it.
func (c *Clients) ReserveRecordMemory(m Member) *kube.Reservation {
	return c.recordMemory.Reserve(m.Namespace, uncountedRecordMemory)
}

// uncountedCounterMemory is uncountedRecordMemory for ReserveCounterMemory. 5,000 pods need less.
const uncountedCounterMemory = 2 << 20

// ReserveCounterMemory returns an empty Reservation for the parts of a member's nodes and pods that package
// clusterstatus counts. The caller must resize and close it.
func (c *Clients) ReserveCounterMemory(m Member) *kube.Reservation {
	return c.recordMemory.Reserve(m.Namespace, uncountedCounterMemory)
}

// LimitConnections replaces the transport of config. The new one applies the egress policy, limits the memory for
// responses, and hides errors that are not from an API server. namespace is the namespace of the member. Copies of
// config share the transport.
func (c *Clients) LimitConnections(config *rest.Config, namespace string) error {
	return c.setTransport(config, namespace, nil)
}

// setTransport is LimitConnections with headers for the proxy of config. It does not set Dial in config, because
// client-go would then create a transport per client.
func (c *Clients) setTransport(config *rest.Config, namespace string, proxyHeader http.Header) error {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return fmt.Errorf("load the certificates for the member: %w", err)
	}
	if tlsConfig == nil {
		tlsConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	transport := &http.Transport{
		Proxy:                  config.Proxy,
		ProxyConnectHeader:     proxyHeader,
		TLSClientConfig:        tlsConfig,
		TLSHandshakeTimeout:    handshakeTimeout,
		MaxIdleConnsPerHost:    maxIdlePerHost,
		MaxResponseHeaderBytes: maxHeader,
		// These buffers hold the part of a response that the hub does not read yet, because it waits for memory.
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 256 << 10, MaxReceiveBufferPerConnection: 1 << 20},
	}
	pathPrefix := ""
	if server, _, err := rest.DefaultServerUrlFor(config); err == nil {
		pathPrefix = strings.TrimSuffix(server.Path, "/")
	}
	limited := c.egress.Transport(utilnet.SetTransportDefaults(transport), &net.Dialer{Timeout: dialTimeout, KeepAlive: dialTimeout})
	config.TLSClientConfig, config.Proxy = rest.TLSClientConfig{}, nil
	config.Transport = memberTransport{Transport: limited, pathPrefix: pathPrefix, memory: c.responseMemory, namespace: namespace}
	if c.Wrap != nil {
		config.Wrap(c.Wrap)
	}
	return nil
}

// memberTransport limits the memory for responses, and replaces the body of an error response that is not a Status of
// Kubernetes, except for health checks. client-go includes the body in the error, and the hub writes the error to the
// status of the cluster. Without the replacement, a user could register an internal server as a cluster, or a cluster
// that redirects to it, and read its responses.
type memberTransport struct {
	egress.Transport
	// pathPrefix is the path in the URL of the API server.
	pathPrefix string
	memory     *kube.ResponseMemory
	// namespace is the namespace of the member.
	namespace string
}

// RoundTrip implements http.RoundTripper.
func (t memberTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := t.Transport.RoundTrip(withoutProtobuf(request))
	if err != nil {
		return response, err
	}
	if response.Header.Get("Location") != "" && response.StatusCode/100 == 3 {
		response.Body.Close()
		return nil, fmt.Errorf("the server answered %d %s: it redirects, which API servers do not; use the address to which it redirects", response.StatusCode, http.StatusText(response.StatusCode))
	}
	path := strings.TrimPrefix(request.URL.Path, t.pathPrefix)
	content := contentOf(request, path)
	switch {
	case response.StatusCode == http.StatusSwitchingProtocols:
		response.Body.Close()
		return nil, errors.New("the server switches the protocol, which was not requested")
	case response.StatusCode >= http.StatusBadRequest:
		if err := t.replaceError(path, response); err != nil {
			return nil, err
		}
	case request.URL.Query().Get("watch") != "":
		beginsWithList := request.URL.Query().Get("sendInitialEvents") != ""
		response.Body = t.memory.LimitEvents(response.Body, t.namespace, content, beginsWithList)
		response.Header.Set("Content-Type", runtime.ContentTypeJSON)
	default:
		response.Body = t.memory.Limit(response.Body, t.namespace, content)
		if isObjectPath(path) {
			response.Body = kube.RequireObject(response.Body)
		}
		// The body was checked as JSON, so client-go must not decode it as YAML, as which it can be another object: the media
		// type becomes JSON. A media type that is JSON already stays, since aggregated discovery needs its parameters.
		if mediaType, _, err := mime.ParseMediaType(response.Header.Get("Content-Type")); content != kube.ContentText && (err != nil || mediaType != runtime.ContentTypeJSON) {
			response.Header.Set("Content-Type", runtime.ContentTypeJSON)
		}
	}
	return response, nil
}

// replaceError replaces the body of an error response if it is not a Status of Kubernetes, except on health paths.
func (t memberTransport) replaceError(path string, response *http.Response) error {
	limited := t.memory.Limit(response.Body, t.namespace, kube.ContentText)
	defer limited.Close()
	body, err := io.ReadAll(io.LimitReader(limited, maxErrorBody))
	if err != nil {
		return err
	}
	if !isStatus(body) && !isHealthPath(path) {
		body = fmt.Appendf(nil, "the server answered %d %s, without a Status of Kubernetes", response.StatusCode, http.StatusText(response.StatusCode))
	}
	response.Body, response.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return nil
}

// contentOf returns the kind of content that the response to a request must have.
func contentOf(request *http.Request, path string) kube.Content {
	switch {
	case podLogs.MatchString(path) || isHealthPath(path):
		return kube.ContentText
	case strings.Contains(request.Header.Get("Accept"), "as=PartialObjectMetadata"):
		return kube.ContentMetadata
	}
	return kube.ContentObjects
}

// withoutProtobuf returns request without Protobuf in its Accept header, which clients of metadata prefer: only the
// memory of JSON can be limited. A kube.ResponseMemory rejects a response in Protobuf.
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

// isStatus returns whether the body of a response is a Status of Kubernetes, in JSON.
func isStatus(body []byte) bool {
	var kind struct{ Kind, APIVersion string }
	return json.Unmarshal(body, &kind) == nil && kind.Kind == "Status" && kind.APIVersion == "v1"
}

// objectPaths matches the paths of objects and lists of an API server, and podLogs the paths of logs, which are text.
var (
	objectPaths = regexp.MustCompile(`^(/api/v1|/apis/[^/]+/[^/]+)/.`)
	podLogs     = regexp.MustCompile(`^/api/v1/namespaces/[^/]+/pods/[^/]+/log$`)
)

// isObjectPath returns whether the response to a request for a path of an API server is an object or a list of objects.
func isObjectPath(path string) bool {
	return objectPaths.MatchString(path) && !podLogs.MatchString(path)
}

// isHealthPath returns whether path is a health check of an API server. Its response is text, from which package
// clusterstatus reports only the names of failed checks.
func isHealthPath(path string) bool { return path == "/readyz" || path == "/healthz" }
