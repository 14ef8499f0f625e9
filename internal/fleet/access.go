package fleet

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// Those of client-go, whose transport has no headers for proxies.
const (
	dialLimit      = 30 * time.Second
	handshakeLimit = 10 * time.Second
	idlePerHost    = 25
)

// accessed returns how to connect to a member by its Access. The Secret is read each time, so that a token that was replaced is used at once.
func (c *Clients) accessed(ctx context.Context, m Member) (*rest.Config, error) {
	if m.Access.Secret.Name == "" {
		return nil, fmt.Errorf("connect to %s: spec.secretRef is missing", m.Key())
	}
	secret := &corev1.Secret{}
	if err := c.hubReader.Get(ctx, m.Access.Secret, secret); err != nil {
		return nil, fmt.Errorf("connect to %s: read spec.secretRef: %w", m.Key(), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	have, ok := c.cache[m.Key()]
	if ok && equality.Semantic.DeepEqual(have.access, m.Access) && have.secretUID == secret.UID && have.resourceVersion == secret.ResourceVersion {
		return have.config, nil
	}
	config, err := fromAccess(m.Access, secret)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", m.Key(), err)
	}
	c.cache[m.Key()] = cachedConfig{secretUID: secret.UID, resourceVersion: secret.ResourceVersion, access: m.Access, config: config}
	return config, nil
}

// fromAccess returns how to connect with what is in secret. Errors name the field of the Cluster.
func fromAccess(a *Access, secret *corev1.Secret) (*rest.Config, error) {
	endpoint, err := ParseEndpoint(a.Server)
	if err != nil {
		return nil, fmt.Errorf("spec.apiEndpoint: %w", err)
	}
	token := strings.TrimSpace(string(secret.Data[clusterv1alpha1.SecretTokenKey]))
	if token == "" {
		return nil, fmt.Errorf("spec.secretRef: secret %s has no key %q", a.Secret, clusterv1alpha1.SecretTokenKey)
	}
	// As with a kubeconfig, the member limits the rate.
	config := &rest.Config{Host: endpoint.String(), BearerToken: token, QPS: -1}
	if config.TLSClientConfig, err = trust(a, secret); err != nil {
		return nil, err
	}
	if a.ProxyURL == "" {
		return config, nil
	}
	proxy, err := url.Parse(a.ProxyURL)
	if err != nil || CheckProxyURL(a.ProxyURL) != nil {
		// It is not quoted, since a password may be in it.
		return nil, errors.New("spec.proxyURL: it is not an http://, https:// or socks5:// address")
	}
	return throughProxy(config, proxy, connectHeader(a.ProxyHeader))
}

// trust says whose certificate the member's API server must have.
func trust(a *Access, secret *corev1.Secret) (rest.TLSClientConfig, error) {
	if a.Insecure {
		// Whoever wrote the Cluster asked for that, by its field.
		return rest.TLSClientConfig{Insecure: true}, nil
	}
	authority, ok := secret.Data[clusterv1alpha1.SecretCABundleKey]
	if !ok {
		return rest.TLSClientConfig{}, fmt.Errorf("spec.secretRef: secret %s has no key %q", a.Secret, clusterv1alpha1.SecretCABundleKey)
	}
	if _, err := cert.ParseCertsPEM(authority); err != nil {
		return rest.TLSClientConfig{}, fmt.Errorf("spec.secretRef: key %q of secret %s: %w", clusterv1alpha1.SecretCABundleKey, a.Secret, err)
	}
	return rest.TLSClientConfig{CAData: authority}, nil
}

// connectHeader returns the headers that a proxy is sent: a comma separates several values of one.
func connectHeader(given map[string]string) http.Header {
	header := http.Header{}
	for name, values := range given {
		for value := range strings.SplitSeq(values, ",") {
			header.Add(name, strings.TrimSpace(value))
		}
	}
	return header
}

// throughProxy returns config with a transport of its own, which all its copies share: client-go knows no headers for proxies, and would make
// a transport per client for a config that has a proxy.
func throughProxy(config *rest.Config, proxy *url.URL, header http.Header) (*rest.Config, error) {
	secured, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, fmt.Errorf("trust the member's API server: %w", err)
	}
	if secured == nil {
		secured = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	config.TLSClientConfig = rest.TLSClientConfig{}
	config.Transport = utilnet.SetTransportDefaults(&http.Transport{
		Proxy:               http.ProxyURL(proxy),
		ProxyConnectHeader:  header,
		TLSClientConfig:     secured,
		TLSHandshakeTimeout: handshakeLimit,
		MaxIdleConnsPerHost: idlePerHost,
		DialContext:         (&net.Dialer{Timeout: dialLimit, KeepAlive: dialLimit}).DialContext,
	})
	return config, nil
}
