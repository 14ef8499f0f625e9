package survey

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
)

const (
	// maxAnswer is how many bytes of an answer are read: /readyz lists some hundred checks at most.
	maxAnswer = 64 << 10
	// maxReason is how many bytes of a reason are told.
	maxReason = 512
)

// ask asks the cluster how it is, and returns what that makes of the condition Ready.
func (o *Observer) ask(ctx context.Context) metav1.Condition {
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	path := "readyz"
	code, body, err := o.get(ctx, path)
	if err == nil && code == http.StatusNotFound {
		path = "healthz"
		code, body, err = o.get(ctx, path)
	}
	return judge(path, code, string(body), err)
}

// version returns the gitVersion of the cluster, "" if it does not say.
func (o *Observer) version(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	code, body, err := o.get(ctx, "version")
	info := version.Info{}
	if err != nil || code != http.StatusOK || json.Unmarshal(body, &info) != nil {
		return ""
	}
	return info.GitVersion
}

// get returns the answer of the cluster at path.
func (o *Observer) get(ctx context.Context, path string) (code int, body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.base.JoinPath(path).String(), nil)
	if err != nil {
		return 0, nil, fmt.Errorf("make request: %w", err)
	}
	answer, err := o.http.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer answer.Body.Close()
	body, err = io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return 0, nil, fmt.Errorf("read answer: %w", err)
	}
	return answer.StatusCode, body, nil
}

// judge returns what an answer at path makes of the condition Ready: its code and body, or err if there was none.
func judge(path string, code int, body string, err error) metav1.Condition {
	ready := metav1.Condition{Type: clusterv1alpha1.ClusterConditionReady, Status: metav1.ConditionFalse}
	switch {
	case err != nil:
		ready.Reason, ready.Message = clusterv1alpha1.ReasonClusterNotReachable, "cluster is not reachable: "+Steadily(err)
	case code >= http.StatusOK && code < http.StatusMultipleChoices:
		ready.Status, ready.Reason, ready.Message = metav1.ConditionTrue, clusterv1alpha1.ReasonClusterReady, "cluster is healthy"
	case code == http.StatusUnauthorized, code == http.StatusForbidden:
		ready.Reason = clusterv1alpha1.ReasonClusterNotReady
		ready.Message = fmt.Sprintf("cluster is reachable, and does not let us ask how it is: /%s answers %s", path, status(code))
	default:
		ready.Reason = clusterv1alpha1.ReasonClusterNotReady
		ready.Message = fmt.Sprintf("cluster is reachable, and not ready: /%s answers %s%s", path, status(code), failing(body))
	}
	return ready
}

func status(code int) string {
	return strings.TrimSpace(fmt.Sprintf("%d %s", code, http.StatusText(code)))
}

// failing lists the checks that a health endpoint says have failed: lines as "[-]etcd failed: ...".
func failing(body string) string {
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
	return shortened(", failing: " + strings.Join(checks, ", "))
}

// passing finds what of a failure is another one each time: the port that a connection was made from.
var passing = regexp.MustCompile(`(\b[0-9.]+|\[[0-9a-f:.%]+\]):[0-9]+->`)

// Steadily says why a cluster could not be asked, in the same words for the same reason: without times, ports of our own and limits that
// depend on the moment.
func Steadily(err error) string {
	var request *url.Error
	if errors.As(err, &request) {
		err = request.Err
	}
	var (
		lookup *net.DNSError
		slow   net.Error
		dated  x509.CertificateInvalidError
	)
	switch {
	case errors.As(err, &lookup):
		return shortened(fmt.Sprintf("lookup %s: %s", lookup.Name, lookup.Err))
	case errors.As(err, &dated) && dated.Reason == x509.Expired:
		return fmt.Sprintf("its certificate is valid from %s to %s only", dated.Cert.NotBefore.UTC().Format(time.RFC3339), dated.Cert.NotAfter.UTC().Format(time.RFC3339))
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &slow) && slow.Timeout():
		return fmt.Sprintf("it does not answer within %s", healthLimit)
	}
	return shortened(passing.ReplaceAllString(err.Error(), ""))
}

// shortened cuts a text that strangers may have made long.
func shortened(text string) string {
	if len(text) <= maxReason {
		return text
	}
	return strings.ToValidUTF8(text[:maxReason], "") + "..."
}
