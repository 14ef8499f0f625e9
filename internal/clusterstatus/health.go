package clusterstatus

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// maxBody is the number of bytes of a response that are read. It is enough for a few hundred checks of /readyz.
	maxBody = 64 << 10
	// maxMessage is the maximum length of a message in bytes.
	maxMessage = 512
	// maxVersion is the maximum length of kubernetesVersion in the status of a Cluster, in bytes. With a longer version
	// the hub would reject the whole status.
	maxVersion = 256
)

// checkHealth requests /readyz, or /healthz if the cluster has no /readyz, and returns the condition Ready.
func (o *Observer) checkHealth(ctx context.Context) metav1.Condition {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	path := "readyz"
	code, body, err := o.get(ctx, path)
	if err == nil && code == http.StatusNotFound {
		path = "healthz"
		code, body, err = o.get(ctx, path)
	}
	return readyCondition(path, code, string(body), err)
}

// readVersion returns the gitVersion of the cluster, or "" on failure and if it is too long.
func (o *Observer) readVersion(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	code, body, err := o.get(ctx, "version")
	info := version.Info{}
	if err != nil || code != http.StatusOK || json.Unmarshal(body, &info) != nil || len(info.GitVersion) > maxVersion {
		return ""
	}
	return info.GitVersion
}

// get sends a GET request to a path of the API server, and returns at most maxBody bytes of the body.
func (o *Observer) get(ctx context.Context, path string) (code int, body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.baseURL.JoinPath(path).String(), nil)
	if err != nil {
		return 0, nil, fmt.Errorf("create request: %w", err)
	}
	response, err := o.httpClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	body, err = io.ReadAll(io.LimitReader(response.Body, maxBody))
	if err != nil {
		return 0, nil, fmt.Errorf("read response: %w", err)
	}
	return response.StatusCode, body, nil
}

// readyCondition returns the condition Ready for a response (code and body) from path, or for err if there was no
// response.
func readyCondition(path string, code int, body string, err error) metav1.Condition {
	ready := metav1.Condition{Type: clusterv1alpha1.ClusterConditionReady, Status: metav1.ConditionFalse}
	switch {
	case err != nil:
		ready.Reason, ready.Message = clusterv1alpha1.ReasonClusterNotReachable, "cluster is not reachable: "+StableMessage(err)
	case code >= http.StatusOK && code < http.StatusMultipleChoices:
		ready.Status, ready.Reason, ready.Message = metav1.ConditionTrue, clusterv1alpha1.ReasonClusterReady, "cluster is healthy"
	case code == http.StatusUnauthorized, code == http.StatusForbidden:
		ready.Reason = clusterv1alpha1.ReasonClusterNotReady
		ready.Message = fmt.Sprintf("cluster is reachable, but denies the health request: /%s answers %s", path, statusText(code))
	default:
		ready.Reason = clusterv1alpha1.ReasonClusterNotReady
		ready.Message = fmt.Sprintf("cluster is reachable, and not ready: /%s answers %s%s", path, statusText(code), failedChecks(body))
	}
	return ready
}

func statusText(code int) string {
	return strings.TrimSpace(fmt.Sprintf("%d %s", code, http.StatusText(code)))
}

// failedChecks returns ", failing: " and the names of the failed checks in the body of a health response, or "". Their
// lines look like "[-]etcd failed: ...".
func failedChecks(body string) string {
	var checks []string
	for line := range strings.Lines(body) {
		if check, ok := strings.CutPrefix(line, "[-]"); ok {
			check, _, _ = strings.Cut(strings.TrimSpace(check), " ")
			checks = append(checks, check)
		}
	}
	if len(checks) == 0 {
		return ""
	}
	return kube.Truncate(", failing: "+strings.Join(checks, ", "), maxMessage)
}

// sourcePort matches the source address of a connection, whose port differs each time.
var sourcePort = regexp.MustCompile(`(\b[0-9.]+|\[[0-9a-f:.%]+\]):[0-9]+->`)

// StableMessage describes why a request to a cluster failed; err is not nil. The same cause always gives the same
// message, without times, source ports and remaining timeouts.
func StableMessage(err error) string {
	var urlErr *url.Error
	if errors.As(err, &urlErr) {
		err = urlErr.Err
	}
	var (
		dnsErr  *net.DNSError
		netErr  net.Error
		certErr x509.CertificateInvalidError
	)
	switch {
	case errors.As(err, &dnsErr):
		return kube.Truncate(fmt.Sprintf("lookup %s: %s", dnsErr.Name, dnsErr.Err), maxMessage)
	case errors.As(err, &certErr) && certErr.Reason == x509.Expired:
		return fmt.Sprintf("its certificate is valid from %s to %s only", certErr.Cert.NotBefore.UTC().Format(time.RFC3339), certErr.Cert.NotAfter.UTC().Format(time.RFC3339))
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &netErr) && netErr.Timeout():
		return fmt.Sprintf("it does not answer within %s", healthTimeout)
	}
	return kube.Truncate(sourcePort.ReplaceAllString(err.Error(), ""), maxMessage)
}
