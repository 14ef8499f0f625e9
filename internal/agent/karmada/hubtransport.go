package karmada

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// hubTransport is the transport to the hub of one kubeconfig. Its certificate can be replaced while clients of config
// continue to work.
type hubTransport struct {
	config *rest.Config
	// kubeconfig is the current kubeconfig, and context the name of the context in it, "" for the current one.
	kubeconfig []byte
	context    string
	// isFile is true for the kubeconfig of --karmada-kubeconfig, and false for one from a Secret.
	isFile  bool
	current atomic.Pointer[identity]
}

// identity is a certificate of the agent, and the connections that use it.
type identity struct {
	transport http.RoundTripper
	// certificate is nil if the kubeconfig has another kind of credential.
	certificate *x509.Certificate
	// replaced ends when another identity is in use. endReplaced ends it.
	replaced    context.Context //nolint:containedctx // watches outlive the call that opens them
	endReplaced context.CancelFunc
}

func newHubTransport(kubeconfig []byte, o Options) (*hubTransport, error) {
	t := &hubTransport{isFile: o.HubKubeconfig != "", context: o.HubContext}
	config, err := t.setKubeconfig(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("load the kubeconfig of the hub: %w", err)
	}
	t.config = &rest.Config{
		Host: config.Host, APIPath: config.APIPath, Transport: t, UserAgent: "towline-agent", QPS: o.HubQPS, Burst: o.HubBurst,
		WrapTransport: o.wrapHubTransport,
	}
	return t, nil
}

// setKubeconfig uses the identity of a kubeconfig for all later requests. Pending requests finish with the old
// identity. Open watches, which could last longer than the old certificate is valid, end as if the hub had ended them.
// Then their clients open new ones.
func (t *hubTransport) setKubeconfig(kubeconfig []byte) (*rest.Config, error) {
	config, err := t.parseKubeconfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	next := &identity{}
	next.replaced, next.endReplaced = context.WithCancel(context.Background())
	if len(config.CertData) > 0 {
		chain, err := cert.ParseCertsPEM(config.CertData)
		if err != nil {
			return nil, fmt.Errorf("parse the certificate in the kubeconfig: %w", err)
		}
		next.certificate = chain[0]
	}
	if next.transport, err = rest.TransportFor(config); err != nil {
		return nil, fmt.Errorf("use kubeconfig: %w", err)
	}
	t.kubeconfig = bytes.Clone(kubeconfig)
	if previous := t.current.Swap(next); previous != nil {
		previous.endReplaced()
		utilnet.CloseIdleConnectionsFor(previous.transport)
	}
	return config, nil
}

// parseKubeconfig returns the configuration of a kubeconfig. A kubeconfig from a Secret must not refer to files or run
// programs. The file of --karmada-kubeconfig may do both, because the user who starts the agent has chosen it.
func (t *hubTransport) parseKubeconfig(kubeconfig []byte) (*rest.Config, error) {
	if !t.isFile {
		return fleet.ParseKubeconfig(kubeconfig)
	}
	raw, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}
	config, err := clientcmd.NewDefaultClientConfig(*raw, &clientcmd.ConfigOverrides{CurrentContext: t.context}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}
	if err := rest.LoadTLSFiles(config); err != nil {
		return nil, fmt.Errorf("read the files of the kubeconfig: %w", err)
	}
	return config, nil
}

// RoundTrip sends the request with the current identity. If the identity was replaced while a watch was being opened,
// RoundTrip opens the watch again.
func (t *hubTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	if !request.URL.Query().Has("watch") {
		return t.current.Load().transport.RoundTrip(request)
	}
	for {
		current := t.current.Load()
		response, err := current.watch(request)
		if err == nil || current.replaced.Err() == nil || request.Context().Err() != nil {
			return response, err
		}
	}
}

// watch opens a watch that ends when the identity is replaced.
func (i *identity) watch(request *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(request.Context())
	stopAfterFunc := context.AfterFunc(i.replaced, cancel) //nolint:contextcheck // the request has its own, which ends when this one does
	end := func() { stopAfterFunc(); cancel() }
	response, err := i.transport.RoundTrip(request.WithContext(ctx))
	if err != nil {
		end()
		return nil, err
	}
	response.Body = &watchBody{ReadCloser: response.Body, replaced: i.replaced, end: end}
	return response, nil
}

// watchBody is the response body of a watch.
type watchBody struct {
	io.ReadCloser
	replaced context.Context //nolint:containedctx // as in identity
	end      func()
}

// Read returns io.EOF if the watch ended because the identity was replaced.
func (b *watchBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && b.replaced.Err() != nil {
		err = io.EOF
	}
	return n, err
}

// Close ends the watch.
func (b *watchBody) Close() error {
	b.end()
	return b.ReadCloser.Close()
}

// WrappedRoundTripper returns the current transport, as client-go's transport utilities expect.
func (t *hubTransport) WrappedRoundTripper() http.RoundTripper { return t.current.Load().transport }

// certificate returns the certificate in use, or nil.
func (t *hubTransport) certificate() *x509.Certificate { return t.current.Load().certificate }

// withCertificate returns the kubeconfig with another certificate.
func (t *hubTransport) withCertificate(certificate, key []byte) ([]byte, error) {
	raw, err := clientcmd.Load(t.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}
	name := t.context
	if name == "" {
		name = raw.CurrentContext
	}
	var user *clientcmdapi.AuthInfo
	if context := raw.Contexts[name]; context != nil {
		user = raw.AuthInfos[context.AuthInfo]
	}
	if user == nil {
		return nil, fmt.Errorf("the kubeconfig has no user for context %q", name)
	}
	user.ClientCertificate, user.ClientKey = "", ""
	user.ClientCertificateData, user.ClientKeyData = certificate, key
	return clientcmd.Write(*raw)
}

// newHubClient returns a client for the kinds that an agent uses. It needs no discovery requests.
func newHubClient(config *rest.Config) (client.WithWatch, error) {
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(clusterv1alpha1.GroupVersion.WithKind("Cluster"), meta.RESTScopeRoot)
	mapper.Add(workv1alpha1.GroupVersion.WithKind(workv1alpha1.WorkKind), meta.RESTScopeNamespace)
	mapper.Add(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationGroupKind), meta.RESTScopeNamespace)
	mapper.Add(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind), meta.RESTScopeNamespace)
	mapper.Add(coordinationv1.SchemeGroupVersion.WithKind("Lease"), meta.RESTScopeNamespace)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Secret"), meta.RESTScopeNamespace)
	hubClient, err := client.NewWithWatch(deliver.LimitResponses(config), client.Options{Scheme: kube.Scheme(), Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("create a client for the hub: %w", err)
	}
	return hubClient, nil
}

// isRejected returns true if err means that the hub, or a proxy that verifies certificates, does not accept the
// certificate.
func isRejected(err error) bool {
	if apierrors.IsUnauthorized(err) {
		return true
	}
	var remote *net.OpError
	if !errors.As(err, &remote) || remote.Op != "remote error" {
		return false
	}
	for _, alert := range certificateAlerts() {
		if remote.Err.Error() == alert.Error() {
			return true
		}
	}
	return false
}

// certificateAlerts returns the TLS alerts by which a server rejects a client certificate (RFC 8446, section 6): bad,
// unsupported, revoked, expired and unknown certificate, unknown authority, access denied and missing certificate.
func certificateAlerts() []tls.AlertError { return []tls.AlertError{42, 43, 44, 45, 46, 48, 49, 116} }

// isMissingCluster returns true if err means that the hub has no such Cluster, or has removed the agent's permissions.
func isMissingCluster(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) }

const (
	// The Kubernetes signers set NotBefore to the time of issue minus backdate. For a requested lifetime of at most
	// maxShortLifetime they set NotAfter to the time of issue plus this lifetime. Then the time from NotBefore to NotAfter
	// is backdate longer than the requested lifetime.
	maxShortLifetime = 8 * time.Hour
	backdate         = 5 * time.Minute
)

// requestedLifetime returns the lifetime that was requested for certificate. annotation is the value of
// lifetimeAnnotation. If it is for another certificate, the lifetime is computed from NotBefore and NotAfter.
func requestedLifetime(certificate *x509.Certificate, annotation string) time.Duration {
	var lifetime, id string
	if n, _ := fmt.Sscanf(annotation, "%s %s", &lifetime, &id); n == 2 && id == certificateID(certificate) {
		if known, err := time.ParseDuration(lifetime); err == nil {
			return known
		}
	}
	total := certificate.NotAfter.Sub(certificate.NotBefore)
	if total > 2*backdate && total <= maxShortLifetime+backdate {
		return total - backdate
	}
	return total
}

// formatLifetime returns the value of lifetimeAnnotation for a certificate and its requested lifetime.
func formatLifetime(certificate *x509.Certificate, lifetime time.Duration) string {
	return lifetime.String() + " " + certificateID(certificate)
}

// certificateID identifies a certificate.
func certificateID(certificate *x509.Certificate) string {
	sum := sha256.Sum256(certificate.Raw)
	return hex.EncodeToString(sum[:8])
}

// renewalTime returns the time at which the remaining fraction of the certificate's lifetime is threshold.
func renewalTime(certificate *x509.Certificate, threshold float64) time.Time {
	total := certificate.NotAfter.Sub(certificate.NotBefore)
	return certificate.NotAfter.Add(-time.Duration(float64(total) * threshold))
}
