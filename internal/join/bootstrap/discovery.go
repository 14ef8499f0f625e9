package bootstrap

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/clock"
)

const (
	// clusterInfoPath is the path of the ConfigMap with the hub's address and certificate authority. Anonymous users may
	// read it.
	clusterInfoPath = "/api/v1/namespaces/kube-public/configmaps/cluster-info"
	// kubeconfigKey is the key of the kubeconfig. signaturePrefix is the prefix of the key of its signature; the id of the
	// token follows.
	kubeconfigKey   = "kubeconfig"
	signaturePrefix = "jws-kubeconfig-"
	// maxResponseBytes limits the bytes of a response: an object of an API server is smaller.
	maxResponseBytes = 2 << 20
	// requestTimeout limits one request.
	requestTimeout = 10 * time.Second
	// connectInterval is the time between two attempts to reach the hub. A random time of at most connectJitter times the
	// interval is added. Both are as in Karmada.
	connectInterval = 5 * time.Second
	connectJitter   = 0.3
	// signatureInterval and signatureTimeout apply if the hub has not signed cluster-info with the token. The hub signs
	// with a new token within two seconds.
	signatureInterval = time.Second
	signatureTimeout  = 20 * time.Second
)

// ErrUnverifiable is returned for a Discovery with neither Pins nor UnsafeSkipCA.
var ErrUnverifiable = errors.New("need to verify CACertHashes, or set --discovery-token-unsafe-skip-ca-verification=true")

// Discovery finds the certificate authorities of the hub, with a token and pins of their keys.
type Discovery struct {
	// Endpoint is <host>:<port> of the hub's API server.
	Endpoint string
	// Token must have signed the response of the hub.
	Token Token
	// Pins are hashes of public keys, each "sha256:<hex>". One of the hub's certificate authorities must have a pinned
	// key. Pins may be empty only with UnsafeSkipCA: then every holder of the token can impersonate the hub.
	Pins         []string
	UnsafeSkipCA bool
	// Timeout limits the time until the hub responds. 0: one attempt.
	Timeout time.Duration
	// Clock is for tests. Default: the real clock.
	Clock clock.Clock
	// Progress is called with the reason for a wait when the reason changes. It may be nil.
	Progress func(string)
}

// CA returns the certificate authorities of the hub, in PEM. Its errors begin with "couldn't validate the identity of
// the API Server".
func (d Discovery) CA(ctx context.Context) ([]byte, error) {
	ca, err := d.awaitCA(ctx)
	if err != nil {
		return nil, fmt.Errorf("couldn't validate the identity of the API Server: %w", err)
	}
	return ca, nil
}

// missingSignatureError is the error for a cluster-info without a signature of the token. retriableError wraps errors
// after which another attempt may succeed.
type (
	missingSignatureError struct{ id string }
	retriableError        struct{ error }
)

func (u missingSignatureError) Error() string {
	return fmt.Sprintf("token id %q is invalid for this cluster or it has expired. Use \"karmadactl token create\" on the karmada-control-plane to create a new valid token", u.id)
}

func (r retriableError) Unwrap() error { return r.error }

// awaitCA retries readVerifiedCA until the hub can be reached and has signed cluster-info with the token.
func (d Discovery) awaitCA(ctx context.Context) ([]byte, error) {
	pins, err := normalizePins(d.Pins)
	if err != nil {
		return nil, err
	}
	if len(pins) == 0 && !d.UnsafeSkipCA {
		return nil, ErrUnverifiable
	}
	if d.Clock == nil {
		d.Clock = clock.RealClock{}
	}
	if d.Progress == nil {
		d.Progress = func(string) {}
	}
	started, lastMessage := d.Clock.Now(), ""
	for {
		ca, err := d.readVerifiedCA(ctx, pins)
		var missingSignature missingSignatureError
		var retriable retriableError
		interval, timeout := wait.Jitter(connectInterval, connectJitter), d.Timeout
		switch {
		case err == nil:
			return ca, nil
		case errors.As(err, &missingSignature):
			interval, timeout = signatureInterval, min(signatureTimeout, d.Timeout)
		case !errors.As(err, &retriable):
			return nil, err
		}
		if ctx.Err() != nil || d.Clock.Since(started)+interval > timeout {
			return nil, err
		}
		if err.Error() != lastMessage {
			lastMessage = err.Error()
			d.Progress("waiting for the API Server: " + lastMessage)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-d.Clock.After(interval):
		}
	}
}

// readVerifiedCA reads the certificate authorities from the hub. If there are pins, it reads them again over a
// connection on which the hub has a certificate of a pinned authority.
func (d Discovery) readVerifiedCA(ctx context.Context, pins []string) ([]byte, error) {
	// The certificate of the hub cannot be verified yet. verifySignature verifies the response instead.
	info, err := d.getClusterInfo(ctx, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})
	if err != nil {
		return nil, err
	}
	kubeconfig, err := d.verifySignature(info)
	if err != nil {
		return nil, err
	}
	ca, err := caOfKubeconfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	authorities, err := cert.ParseCertsPEM(ca)
	if err != nil {
		return nil, fmt.Errorf("read the cluster CA in cluster-info ConfigMap: %w", err)
	}
	if d.UnsafeSkipCA && len(pins) == 0 {
		return ca, nil
	}
	trusted := x509.NewCertPool()
	pinned := pinnedAuthorities(authorities, pins)
	if len(pinned) == 0 {
		return nil, errors.New("cluster CA found in cluster-info ConfigMap is invalid: none of the public keys of its certificates are pinned")
	}
	// A holder of the token may have added an authority: only the pinned ones are trusted.
	for _, authority := range pinned {
		trusted.AddCert(authority)
	}
	verified, err := d.getClusterInfo(ctx, &tls.Config{RootCAs: trusted, MinVersion: tls.VersionTLS12})
	if err != nil {
		return nil, err
	}
	if verified.Data[kubeconfigKey] != kubeconfig {
		return nil, errors.New("the cluster-info ConfigMap is not the same when it is read over a verified connection")
	}
	return ca, nil
}

// verifySignature returns the kubeconfig in info if it is signed with the token.
func (d Discovery) verifySignature(info *corev1.ConfigMap) (string, error) {
	kubeconfig := info.Data[kubeconfigKey]
	if kubeconfig == "" {
		return "", errors.New("there is no kubeconfig in the cluster-info ConfigMap")
	}
	signature, ok := info.Data[signaturePrefix+d.Token.ID]
	if !ok {
		return "", missingSignatureError{id: d.Token.ID}
	}
	if !isSignedBy(d.Token, signature, kubeconfig) {
		return "", errors.New("failed to verify JWS signature of received cluster info object, can't trust this API Server")
	}
	return kubeconfig, nil
}

// caOfKubeconfig returns the certificate authority in a kubeconfig for exactly one cluster.
func caOfKubeconfig(kubeconfig string) ([]byte, error) {
	config, err := clientcmd.Load([]byte(kubeconfig))
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig in the cluster-info ConfigMap: %w", err)
	}
	if len(config.Clusters) != 1 {
		return nil, fmt.Errorf("the kubeconfig in the cluster-info ConfigMap must be about exactly one cluster, and is about %d", len(config.Clusters))
	}
	for _, cluster := range config.Clusters {
		if len(cluster.CertificateAuthorityData) > 0 {
			return cluster.CertificateAuthorityData, nil
		}
	}
	return nil, errors.New("there is no certificate authority in the cluster-info ConfigMap")
}

// getClusterInfo reads cluster-info as an anonymous user.
func (d Discovery) getClusterInfo(ctx context.Context, trust *tls.Config) (*corev1.ConfigMap, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+d.Endpoint+clusterInfoPath, nil)
	if err != nil {
		return nil, fmt.Errorf("ask for the cluster-info ConfigMap: %w", err)
	}
	request.Header.Set("Accept", "application/json")
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: trust, DisableKeepAlives: true}
	// An API server sends no redirects.
	hub := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := hub.Do(request)
	if err != nil {
		var wrong *tls.CertificateVerificationError
		if errors.As(err, &wrong) {
			return nil, fmt.Errorf("the certificate of %s: %w", d.Endpoint, wrong.Err)
		}
		return nil, retriableError{fmt.Errorf("ask for the cluster-info ConfigMap: %w", err)}
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxResponseBytes+1))
	if err != nil {
		return nil, retriableError{fmt.Errorf("read the cluster-info ConfigMap: %w", err)}
	}
	if len(body) > maxResponseBytes {
		return nil, fmt.Errorf("the cluster-info ConfigMap has more than %d bytes", maxResponseBytes)
	}
	if response.StatusCode != http.StatusOK {
		return nil, retriableError{responseError(response.StatusCode, body)}
	}
	info := &corev1.ConfigMap{}
	if err := json.Unmarshal(body, info); err != nil {
		return nil, retriableError{fmt.Errorf("read the cluster-info ConfigMap: %w", err)}
	}
	return info, nil
}

// responseError returns the error for a response without cluster-info.
func responseError(code int, body []byte) error {
	var status metav1.Status
	message := http.StatusText(code)
	if json.Unmarshal(body, &status) == nil && status.Message != "" {
		message = status.Message
	}
	switch code {
	case http.StatusForbidden, http.StatusUnauthorized, http.StatusNotFound:
		return fmt.Errorf("read the cluster-info ConfigMap: %s (does the hub run, and does it know its address?)", message)
	}
	return fmt.Errorf("read the cluster-info ConfigMap: %s", message)
}
