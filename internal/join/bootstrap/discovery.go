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
	// infoPath is the path of the hub's address and certificate authority, which everybody may read.
	infoPath = "/api/v1/namespaces/kube-public/configmaps/cluster-info"
	// infoKey is the key of the kubeconfig; signaturePrefix and the id of a token are the key of its signature.
	infoKey         = "kubeconfig"
	signaturePrefix = "jws-kubeconfig-"
	// infoLimit limits the bytes of a response: an object of an API server is smaller.
	infoLimit = 2 << 20
	// askLimit limits one request.
	askLimit = 10 * time.Second
	// askPause is the time between two attempts to reach the hub, with a jitter of askJitter of it. Both are as in
	// Karmada.
	askPause  = 5 * time.Second
	askJitter = 0.3
	// signPause and signLimit are for a hub that has not signed with the token yet: it signs with a new one within two
	// seconds.
	signPause = time.Second
	signLimit = 20 * time.Second
)

// ErrUnverifiable is returned for a Discovery that cannot verify the hub.
var ErrUnverifiable = errors.New("need to verify CACertHashes, or set --discovery-token-unsafe-skip-ca-verification=true")

// Discovery finds the certificate authorities of the hub, with a token and pins of their keys.
type Discovery struct {
	// Endpoint is <host>:<port> of the hub's API server.
	Endpoint string
	// Token must have signed the response of the hub.
	Token Token
	// Pins are "sha256:<hex>" of the public keys of the hub's certificate authority, one of which must be told.
	// UnsafeSkipCA does without them: whoever knows the token can then pass for the hub.
	Pins         []string
	UnsafeSkipCA bool
	// Timeout is how long a hub is waited for that cannot be reached.
	Timeout time.Duration
	// Clock tells the time. Default: the real one.
	Clock clock.Clock
	// Progress is told, for people, why it takes longer. Default: nobody.
	Progress func(string)
}

// CA returns the certificate authorities of the hub, in PEM. Its errors begin with "couldn't validate the identity of
// the API Server".
func (d Discovery) CA(ctx context.Context) ([]byte, error) {
	ca, err := d.discover(ctx)
	if err != nil {
		return nil, fmt.Errorf("couldn't validate the identity of the API Server: %w", err)
	}
	return ca, nil
}

// unsigned is the error of a hub that has not signed with the token; retriable wraps errors that another attempt may
// not have.
type (
	unsigned  struct{ id string }
	retriable struct{ error }
)

func (u unsigned) Error() string {
	return fmt.Sprintf("token id %q is invalid for this cluster or it has expired. Use \"karmadactl token create\" on the karmada-control-plane to create a new valid token", u.id)
}

func (r retriable) Unwrap() error { return r.error }

// discover retries until the hub can be reached and has signed.
func (d Discovery) discover(ctx context.Context) ([]byte, error) {
	pins, err := readPins(d.Pins)
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
	started, told := d.Clock.Now(), ""
	for {
		ca, err := d.attempt(ctx, pins)
		var missing unsigned
		var passing retriable
		pause, limit := wait.Jitter(askPause, askJitter), d.Timeout
		switch {
		case err == nil:
			return ca, nil
		case errors.As(err, &missing):
			pause, limit = signPause, min(signLimit, d.Timeout)
		case !errors.As(err, &passing):
			return nil, err
		}
		if ctx.Err() != nil || d.Clock.Since(started)+pause > limit {
			return nil, err
		}
		if err.Error() != told {
			told = err.Error()
			d.Progress("waiting for the API Server: " + told)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-d.Clock.After(pause):
		}
	}
}

// attempt reads the certificate authorities from the hub. If there are pins, it reads them again over a connection that
// only a pinned authority can have signed.
func (d Discovery) attempt(ctx context.Context, pins []string) ([]byte, error) {
	// The certificate cannot be verified yet; the signature of the response is.
	info, err := d.fetch(ctx, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})
	if err != nil {
		return nil, err
	}
	kubeconfig, err := d.signed(info)
	if err != nil {
		return nil, err
	}
	ca, err := authorityIn(kubeconfig)
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
	kept := pinned(authorities, pins)
	if len(kept) == 0 {
		return nil, errors.New("cluster CA found in cluster-info ConfigMap is invalid: none of the public keys of its certificates are pinned")
	}
	// A holder of the token may have added an authority: only the pinned ones are trusted.
	for _, authority := range kept {
		trusted.AddCert(authority)
	}
	again, err := d.fetch(ctx, &tls.Config{RootCAs: trusted, MinVersion: tls.VersionTLS12})
	if err != nil {
		return nil, err
	}
	if again.Data[infoKey] != kubeconfig {
		return nil, errors.New("the cluster-info ConfigMap is not the same when it is read over a verified connection")
	}
	return ca, nil
}

// signed returns the kubeconfig in info if it is signed with the token.
func (d Discovery) signed(info *corev1.ConfigMap) (string, error) {
	kubeconfig := info.Data[infoKey]
	if kubeconfig == "" {
		return "", errors.New("there is no kubeconfig in the cluster-info ConfigMap")
	}
	signature, ok := info.Data[signaturePrefix+d.Token.ID]
	if !ok {
		return "", unsigned{id: d.Token.ID}
	}
	if !isSignedBy(d.Token, signature, kubeconfig) {
		return "", errors.New("failed to verify JWS signature of received cluster info object, can't trust this API Server")
	}
	return kubeconfig, nil
}

// authorityIn returns the certificate authority in a kubeconfig for exactly one cluster.
func authorityIn(kubeconfig string) ([]byte, error) {
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

// fetch reads cluster-info as an anonymous user.
func (d Discovery) fetch(ctx context.Context, trust *tls.Config) (*corev1.ConfigMap, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+d.Endpoint+infoPath, nil)
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
		return nil, retriable{fmt.Errorf("ask for the cluster-info ConfigMap: %w", err)}
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, infoLimit+1))
	if err != nil {
		return nil, retriable{fmt.Errorf("read the cluster-info ConfigMap: %w", err)}
	}
	if len(body) > infoLimit {
		return nil, fmt.Errorf("the cluster-info ConfigMap has more than %d bytes", infoLimit)
	}
	if response.StatusCode != http.StatusOK {
		return nil, retriable{refusal(response.StatusCode, body)}
	}
	info := &corev1.ConfigMap{}
	if err := json.Unmarshal(body, info); err != nil {
		return nil, retriable{fmt.Errorf("read the cluster-info ConfigMap: %w", err)}
	}
	return info, nil
}

// refusal returns the error for a response without cluster-info.
func refusal(code int, body []byte) error {
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
