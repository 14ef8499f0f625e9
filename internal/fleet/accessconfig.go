package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// configFromAccess returns the client configuration of a member with an Access.
func (c *Clients) configFromAccess(ctx context.Context, m Member) (*rest.Config, error) {
	if m.Access.Secret.Name == "" {
		return nil, fmt.Errorf("connect to %s: spec.secretRef is missing", m.Key())
	}
	if config := c.cachedConfigIfCurrent(ctx, m, m.Access.Secret); config != nil {
		return config, nil
	}
	secret := &corev1.Secret{}
	if err := c.secrets.Live.Get(ctx, m.Access.Secret, secret); err != nil {
		return nil, fmt.Errorf("connect to %s: read spec.secretRef: %w", m.Key(), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if config := c.lookUpCached(m, secret); config != nil {
		return config, nil
	}
	config, err := c.newAccessConfig(m, secret)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", m.Key(), err)
	}
	c.cache[m.Key()] = cachedConfig{
		registration: m.UID, secretUID: secret.UID, resourceVersion: secret.ResourceVersion, key: m.KubeconfigKey, access: m.Access, config: config,
	}
	return config, nil
}

// newAccessConfig returns the client configuration of a member with an Access and its Secret. Errors name the field of
// the Cluster.
func (c *Clients) newAccessConfig(m Member, secret *corev1.Secret) (*rest.Config, error) {
	a := m.Access
	endpoint, err := ParseEndpoint(a.Server)
	if err != nil {
		return nil, fmt.Errorf("spec.apiEndpoint: %w", err)
	}
	token := strings.TrimSpace(string(secret.Data[clusterv1alpha1.SecretTokenKey]))
	if token == "" {
		return nil, fmt.Errorf("spec.secretRef: secret %s has no key %q", a.Secret, clusterv1alpha1.SecretTokenKey)
	}
	// As with a kubeconfig, only the API server of the member limits the rate of requests.
	config := &rest.Config{Host: endpoint.String(), BearerToken: token, QPS: -1}
	if config.TLSClientConfig, err = tlsConfigOf(a, secret); err != nil {
		return nil, err
	}
	if a.ProxyURL == "" {
		return config, c.LimitConnections(config, m.Namespace)
	}
	proxy, err := url.Parse(a.ProxyURL)
	if err != nil || ValidateProxyURL(a.ProxyURL) != nil {
		// The error omits the value, which may contain a password.
		return nil, errors.New("spec.proxyURL: not an http://, https:// or socks5:// address")
	}
	config.Proxy = http.ProxyURL(proxy)
	return config, c.setTransport(config, m.Namespace, proxyHeader(a.ProxyHeader))
}

// tlsConfigOf returns the TLS settings for the member's API server.
func tlsConfigOf(a *Access, secret *corev1.Secret) (rest.TLSClientConfig, error) {
	if a.Insecure {
		// The field spec.insecureSkipTLSVerification requests that.
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

// proxyHeader returns the headers for a proxy. Commas separate several values of one header.
func proxyHeader(given map[string]string) http.Header {
	header := http.Header{}
	for name, values := range given {
		for value := range strings.SplitSeq(values, ",") {
			header.Add(name, strings.TrimSpace(value))
		}
	}
	return header
}
