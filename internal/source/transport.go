package source

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/phase"
)

const (
	// fetchTimeout limits the fetch of one chart, index included.
	fetchTimeout = 2 * time.Minute
	// dialTimeout and headerTimeout limit the wait for a repository that does not respond.
	dialTimeout   = 10 * time.Second
	headerTimeout = 30 * time.Second
	// maxResponseHeader limits the header of a response in bytes.
	maxResponseHeader = 64 << 10
	// maxIndex limits an index in bytes. The largest public indexes have about 30 MiB.
	maxIndex = 128 << 20
	// maxIndexNodes limits the values in an index. A value of two bytes takes some hundred bytes of memory while the index
	// is parsed. The largest public indexes have 1.5 million.
	maxIndexNodes = 3_000_000
	// maxIndexesSize limits all cached indexes together, in bytes.
	maxIndexesSize = 128 << 20
	// maxCachedChartsSize limits Charts.cachedCharts in bytes. Other entries are read from disk again.
	maxCachedChartsSize = 16 << 20
	// maxFetchedSize limits the responses of all running fetches of charts, in bytes. The number of fetches has no limit,
	// since a fetch continues after Charts.Fetch has returned.
	maxFetchedSize = 128 << 20
	// maxArchive limits an archive in bytes. It is Helm's limit for an unpacked chart.
	maxArchive = 100 << 20
)

// newTransport returns a transport for one fetch. The caller must call CloseIdleConnections. A nil policy allows all
// hosts.
func newTransport(login Login, policy *egress.Policy) (egress.Transport, error) {
	config := &tls.Config{
		MinVersion: tls.VersionTLS12,
		// A profile can disable the verification for a repository.
		InsecureSkipVerify: login.InsecureSkipTLSVerify,
	}
	if len(login.CA) > 0 {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(login.CA) {
			return egress.Transport{}, phase.TerminalErrorf("the repository's CA is not PEM")
		}
	}
	transport := &http.Transport{
		TLSClientConfig:       config,
		TLSHandshakeTimeout:   dialTimeout,
		ResponseHeaderTimeout: headerTimeout,
		ForceAttemptHTTP2:     true,
		// The default is 10 MiB, and parsed short fields take ten times their size.
		MaxResponseHeaderBytes: maxResponseHeader,
	}
	return policy.Transport(transport, &net.Dialer{Timeout: dialTimeout}), nil
}

// countedTransport counts the bytes of all responses in download.
type countedTransport struct {
	next     egress.Transport
	download *meteredDownload
}

// RoundTrip implements http.RoundTripper.
func (t countedTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := t.next.RoundTrip(request)
	if err == nil {
		response.Body = struct {
			io.Reader
			io.Closer
		}{t.download.reader(response.Body), response.Body}
	}
	return response, err
}

// connect returns a context and a transport for one fetch. Its responses count in c.limits until the caller calls
// disconnect, which is required. The context is canceled if the fetch is slow and others need its memory.
func (c *Charts) connect(ctx context.Context, login Login) (fetchContext context.Context, transport http.RoundTripper, disconnect func(), err error) {
	base, err := newTransport(login, c.Egress)
	if err != nil {
		return nil, nil, nil, err
	}
	counted := countedTransport{base, &meteredDownload{share: &fetchShare{limits: c.limits}, maxSize: maxIndex + maxArchive}}
	fetchContext, release := c.limits.register(ctx, counted.download)
	return fetchContext, counted, func() {
		base.CloseIdleConnections()
		counted.download.close()
		release()
	}, nil
}

// readAtMost reads all of r, which must not have more than limit bytes.
func readAtMost(r io.Reader, limit int64) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, stableError(err)
	}
	if int64(len(raw)) > limit {
		return nil, fmt.Errorf("it has more than %d MiB", limit>>20)
	}
	return raw, nil
}

// isNetworkError returns whether err is an error of the network, a timeout or a cancellation.
func isNetworkError(err error) bool {
	_, isNetwork := errors.AsType[net.Error](err)
	return isNetwork || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
}

// stableError returns the error of a request without repetitions, without texts of the server, and without parts that
// differ between attempts, such as a local port.
func stableError(err error) error {
	if urlErr, ok := errors.AsType[*url.Error](err); ok {
		if urlErr.Op == "parse" {
			return errors.New("a URL is not valid") // it can be from a response, and the error has parts of it
		}
		err = urlErr.Err
	}
	if strings.HasPrefix(err.Error(), "failed to parse Location header") {
		return egress.ErrInvalidResponse // the error of http.Client has the header
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		if op.Op == "dial" && op.Addr != nil {
			return fmt.Errorf("dial %s: %w", op.Addr, op.Err)
		}
		return fmt.Errorf("%s: %w", op.Op, op.Err)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("no response in time: %w", err)
	}
	return err
}
