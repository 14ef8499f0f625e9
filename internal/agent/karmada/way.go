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
	"github.com/towline/towline/internal/kube"
)

// way is one way to the hub: an address, and a certificate that can be renewed while clients made from config go on working.
type way struct {
	config *rest.Config
	// kubeconfig is what the way was made of, and context which part of it.
	kubeconfig []byte
	context    string
	current    atomic.Pointer[identity]
}

// identity is one certificate of the agent, and connections to the hub that present it.
type identity struct {
	transport http.RoundTripper
	// certificate is nil if the kubeconfig identifies the agent by something else.
	certificate *x509.Certificate
	// left ends when there is a later identity.
	left context.Context //nolint:containedctx // watches outlive the call that opens them
	// leave ends left.
	leave context.CancelFunc
}

func openWay(kubeconfig []byte, o Options) (*way, error) {
	w := &way{context: o.HubContext}
	config, err := w.take(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read the way to the hub: %w", err)
	}
	w.config = &rest.Config{
		Host: config.Host, APIPath: config.APIPath, Transport: w, UserAgent: "towline-agent", QPS: o.HubQPS, Burst: o.HubBurst,
		WrapTransport: o.wrapHub,
	}
	return w, nil
}

// take makes the identity in a kubeconfig the one that is used from now on. Requests on their way end as they began. Watches would go on for
// minutes with an identity that may not be valid so long: they end, as if the hub had ended them, and whoever watches opens another.
func (w *way) take(kubeconfig []byte) (*rest.Config, error) {
	raw, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}
	config, err := clientcmd.NewDefaultClientConfig(*raw, &clientcmd.ConfigOverrides{CurrentContext: w.context}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}
	if err := rest.LoadTLSFiles(config); err != nil {
		return nil, fmt.Errorf("read the files of the kubeconfig: %w", err)
	}
	next := &identity{}
	next.left, next.leave = context.WithCancel(context.Background())
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
	w.kubeconfig = bytes.Clone(kubeconfig)
	if last := w.current.Swap(next); last != nil {
		last.leave()
		utilnet.CloseIdleConnectionsFor(last.transport)
	}
	return config, nil
}

// RoundTrip sends the request with the latest certificate.
func (w *way) RoundTrip(request *http.Request) (*http.Response, error) {
	if !request.URL.Query().Has("watch") {
		return w.current.Load().transport.RoundTrip(request)
	}
	for {
		used := w.current.Load()
		response, err := used.watch(request)
		if err == nil || used.left.Err() == nil || request.Context().Err() != nil {
			return response, err
		}
	}
}

// watch opens a watch, which ends when there is a later identity.
func (i *identity) watch(request *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(request.Context())
	forget := context.AfterFunc(i.left, cancel) //nolint:contextcheck // the request has its own, which ends when this one does
	end := func() { forget(); cancel() }
	response, err := i.transport.RoundTrip(request.WithContext(ctx))
	if err != nil {
		end()
		return nil, err
	}
	response.Body = &watchBody{ReadCloser: response.Body, left: i.left, end: end}
	return response, nil
}

// watchBody is the body of a watch.
type watchBody struct {
	io.ReadCloser
	left context.Context //nolint:containedctx // as in identity
	end  func()
}

// Read returns io.EOF when the watch was ended for a later identity.
func (b *watchBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && b.left.Err() != nil {
		err = io.EOF
	}
	return n, err
}

// Close closes the body.
func (b *watchBody) Close() error {
	b.end()
	return b.ReadCloser.Close()
}

// WrappedRoundTripper returns the transport below, for those who need to see it.
func (w *way) WrappedRoundTripper() http.RoundTripper { return w.current.Load().transport }

// certificate is the one in use, nil if there is none.
func (w *way) certificate() *x509.Certificate { return w.current.Load().certificate }

// with returns the kubeconfig with another certificate.
func (w *way) with(certificate, key []byte) ([]byte, error) {
	raw, err := clientcmd.Load(w.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}
	name := w.context
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

// newHubClient returns a client for the few kinds that an agent deals with. It asks the hub for no API list.
func newHubClient(config *rest.Config) (client.WithWatch, error) {
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(clusterv1alpha1.GroupVersion.WithKind("Cluster"), meta.RESTScopeRoot)
	mapper.Add(workv1alpha1.GroupVersion.WithKind(workv1alpha1.WorkKind), meta.RESTScopeNamespace)
	mapper.Add(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationGroupKind), meta.RESTScopeNamespace)
	mapper.Add(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationBundleKind), meta.RESTScopeNamespace)
	mapper.Add(coordinationv1.SchemeGroupVersion.WithKind("Lease"), meta.RESTScopeNamespace)
	hub, err := client.NewWithWatch(deliver.LimitResponses(config), client.Options{Scheme: kube.Scheme(), Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("make client for the hub: %w", err)
	}
	return hub, nil
}

// refused says whether err means that the hub does not accept the certificate, or what stands before it and checks that while it connects.
func refused(err error) bool {
	if apierrors.IsUnauthorized(err) {
		return true
	}
	var remote *net.OpError
	if !errors.As(err, &remote) || remote.Op != "remote error" {
		return false
	}
	for _, alert := range alerts() {
		if remote.Err.Error() == alert.Error() {
			return true
		}
	}
	return false
}

// alerts are those of RFC 8446, section 6, by which a server refuses a certificate: a bad one, an unsupported, a revoked, an expired, one that is
// unknown, or made by somebody who is, one that is not let in, and none.
func alerts() []tls.AlertError { return []tls.AlertError{42, 43, 44, 45, 46, 48, 49, 116} }

// unknown says whether err means that the hub has no such Cluster, or has taken its agent's rights away.
func unknown(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) }

const (
	// shortLife is the longest life that signers do not shorten by what they date certificates back, and backdate what that is: those of
	// Kubernetes.
	shortLife = 8 * time.Hour
	backdate  = 5 * time.Minute
)

// lifeOf returns the life to ask for after certificate. noted is the value of lifeAnnotation.
func lifeOf(certificate *x509.Certificate, noted string) time.Duration {
	var life, of string
	if n, _ := fmt.Sscanf(noted, "%s %s", &life, &of); n == 2 && of == serial(certificate) {
		if known, err := time.ParseDuration(life); err == nil {
			return known
		}
	}
	total := certificate.NotAfter.Sub(certificate.NotBefore)
	if total > 2*backdate && total <= shortLife+backdate {
		return total - backdate
	}
	return total
}

// noteLife is the value of lifeAnnotation for a certificate that was asked for with life.
func noteLife(certificate *x509.Certificate, life time.Duration) string {
	return life.String() + " " + serial(certificate)
}

// serial tells certificates apart.
func serial(certificate *x509.Certificate) string {
	sum := sha256.Sum256(certificate.Raw)
	return hex.EncodeToString(sum[:8])
}

// due is when a certificate is to be renewed: when no more than threshold of its life remains.
func due(certificate *x509.Certificate, threshold float64) time.Time {
	total := certificate.NotAfter.Sub(certificate.NotBefore)
	return certificate.NotAfter.Add(-time.Duration(float64(total) * threshold))
}
