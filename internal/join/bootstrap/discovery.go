package bootstrap

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/cert"
	tokenapi "k8s.io/cluster-bootstrap/token/api"

	"github.com/towline/towline/internal/kube"
)

const (
	// requestTimeout limits one request.
	requestTimeout = 10 * time.Second
	// connectInterval is the time between two attempts.
	connectInterval = 2 * time.Second
	// signatureTimeout limits the wait for the signature of a new token, which the hub usually adds within two seconds.
	signatureTimeout = 20 * time.Second
)

// ErrUnverifiable is returned for a Discovery with neither Pins nor UnsafeSkipCA.
var ErrUnverifiable = errors.New("need to verify CACertHashes, or set --discovery-token-unsafe-skip-ca-verification=true")

// Discovery finds the certificate authorities of the hub with a bootstrap token and pins.
type Discovery struct {
	// Endpoint is <host>:<port> of the hub's API server.
	Endpoint string
	// Token must have signed the ConfigMap cluster-info of the hub.
	Token Token
	// Pins are hashes of public keys, each "sha256:<hex>". One of the hub's certificate authorities must have a pinned
	// key. Pins may be empty only with UnsafeSkipCA: then a man in the middle who has the token can impersonate the hub.
	Pins         []string
	UnsafeSkipCA bool
	// Timeout limits the wait for the hub. With 0, there is one attempt.
	Timeout time.Duration
	// Progress is called with the reason for a wait when the reason changes. It is required.
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

// missingSignatureError is the error for a cluster-info that the token has not signed. retriableError wraps temporary
// errors.
type (
	missingSignatureError struct{ id string }
	retriableError        struct{ error }
)

func (u missingSignatureError) Error() string {
	return fmt.Sprintf("token id %q is invalid for this cluster or it has expired. Use \"karmadactl token create\" on the karmada-control-plane to create a new valid token", u.id)
}

func (r retriableError) Unwrap() error { return r.error }

// awaitCA calls readVerifiedCA until the hub responds and has signed cluster-info with the token.
func (d Discovery) awaitCA(ctx context.Context) ([]byte, error) {
	pins, err := normalizePins(d.Pins)
	if err != nil {
		return nil, err
	}
	if len(pins) == 0 && !d.UnsafeSkipCA {
		return nil, ErrUnverifiable
	}
	started, lastMessage := time.Now(), ""
	var ca []byte
	// The requests use ctx without the timeout, so that err describes the hub and not the timeout.
	_ = wait.PollUntilContextTimeout(ctx, connectInterval, d.Timeout, true, func(context.Context) (bool, error) {
		ca, err = d.readVerifiedCA(ctx, pins)
		_, isUnsigned := errors.AsType[missingSignatureError](err)
		_, isRetriable := errors.AsType[retriableError](err)
		mayRetry := isRetriable || isUnsigned && time.Since(started) < signatureTimeout
		if !mayRetry || ctx.Err() != nil {
			return err == nil, err
		}
		if err.Error() != lastMessage {
			lastMessage = err.Error()
			d.Progress("waiting for the API Server: " + lastMessage)
		}
		return false, nil
	})
	return ca, err
}

// readVerifiedCA reads the certificate authorities from the hub. With pins, it reads cluster-info again over a
// connection on which the certificate of the hub is from a pinned authority.
func (d Discovery) readVerifiedCA(ctx context.Context, pins []string) ([]byte, error) {
	// The certificate of the hub cannot be verified yet. verifySignature verifies the content instead.
	info, err := d.getClusterInfo(ctx, rest.TLSClientConfig{Insecure: true})
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
	pinned := pinnedAuthorities(authorities, pins)
	if len(pinned) == 0 {
		return nil, errors.New("cluster CA found in cluster-info ConfigMap is invalid: none of the public keys of its certificates are pinned")
	}
	// A holder of the token can add an authority to cluster-info. Only pinned ones are trusted.
	trusted, err := cert.EncodeCertificates(pinned...)
	if err != nil {
		return nil, fmt.Errorf("read the cluster CA in cluster-info ConfigMap: %w", err)
	}
	verified, err := d.getClusterInfo(ctx, rest.TLSClientConfig{CAData: trusted})
	if err != nil {
		return nil, err
	}
	if verified.Data[tokenapi.KubeConfigKey] != kubeconfig {
		return nil, errors.New("the cluster-info ConfigMap is not the same when it is read over a verified connection")
	}
	return ca, nil
}

// verifySignature returns the kubeconfig in info if the token has signed it.
func (d Discovery) verifySignature(info *corev1.ConfigMap) (string, error) {
	kubeconfig := info.Data[tokenapi.KubeConfigKey]
	if kubeconfig == "" {
		return "", errors.New("there is no kubeconfig in the cluster-info ConfigMap")
	}
	signature, ok := info.Data[tokenapi.JWSSignatureKeyPrefix+d.Token.ID]
	if !ok {
		return "", missingSignatureError{id: d.Token.ID}
	}
	if !hmac.Equal([]byte(signature), []byte(d.Token.signature(kubeconfig))) {
		return "", errors.New("failed to verify JWS signature of received cluster info object, can't trust this API Server")
	}
	return kubeconfig, nil
}

// caOfKubeconfig returns the certificate authorities, in PEM, in a kubeconfig with one cluster.
func caOfKubeconfig(kubeconfig string) ([]byte, error) {
	config, err := clientcmd.Load([]byte(kubeconfig))
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig in the cluster-info ConfigMap: %s", kube.OneLine(err.Error()))
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

// getClusterInfo reads the ConfigMap cluster-info as an anonymous user.
func (d Discovery) getClusterInfo(ctx context.Context, trust rest.TLSClientConfig) (*corev1.ConfigMap, error) {
	clientset, err := kubernetes.NewForConfig(&rest.Config{Host: "https://" + d.Endpoint, TLSClientConfig: trust, Timeout: requestTimeout})
	if err != nil {
		return nil, fmt.Errorf("connect to the hub: %w", err)
	}
	info, err := clientset.CoreV1().ConfigMaps(metav1.NamespacePublic).Get(ctx, tokenapi.ConfigMapClusterInfo, metav1.GetOptions{})
	var wrong *tls.CertificateVerificationError
	switch {
	case err == nil:
		return info, nil
	case errors.As(err, &wrong):
		return nil, fmt.Errorf("the certificate of %s: %w", d.Endpoint, wrong.Err)
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err), apierrors.IsNotFound(err):
		err = fmt.Errorf("%w (does the hub run, and does it know its address?)", err)
	}
	return nil, retriableError{fmt.Errorf("read the cluster-info ConfigMap: %w", err)}
}

// pinPrefix is the prefix of pins. The SHA-256 of the public key in a certificate follows, in hex.
const pinPrefix = "sha256:"

// Pins returns the pins of all certificates in ca, which is PEM.
func Pins(ca []byte) ([]string, error) {
	authorities, err := cert.ParseCertsPEM(ca)
	if err != nil {
		return nil, err
	}
	var pins []string
	for _, authority := range authorities {
		pins = append(pins, pinOf(authority))
	}
	return slices.Compact(pins), nil
}

func pinOf(certificate *x509.Certificate) string {
	sum := sha256.Sum256(certificate.RawSubjectPublicKeyInfo)
	return pinPrefix + hex.EncodeToString(sum[:])
}

// normalizePins returns pins in lower case, or an error if one is invalid.
func normalizePins(given []string) ([]string, error) {
	form := regexp.MustCompile(`^` + pinPrefix + `[0-9a-f]{64}$`)
	var pins []string
	for _, pin := range given {
		pin = strings.ToLower(strings.TrimSpace(pin))
		if !form.MatchString(pin) {
			return nil, fmt.Errorf("invalid CA certificate hash %q: it must be %q and 64 hexadecimal digits", pin, pinPrefix)
		}
		pins = append(pins, pin)
	}
	return pins, nil
}

// pinnedAuthorities removes the authorities without a pinned key from the slice.
func pinnedAuthorities(authorities []*x509.Certificate, pins []string) []*x509.Certificate {
	return slices.DeleteFunc(authorities, func(authority *x509.Certificate) bool { return !slices.Contains(pins, pinOf(authority)) })
}
