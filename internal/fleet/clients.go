package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// ErrPull is the error of asking for a client of a member that only dials out.
var ErrPull = errors.New("a pull member cannot be dialled")

// Clients knows how to connect to push members. Use NewClients.
type Clients struct {
	hubReader client.Reader
	hub       *rest.Config

	// mu guards cache.
	mu    sync.Mutex
	cache map[string]cachedConfig
}

// cachedConfig is the config made from one version of one key of one Secret, with an Access if there is one, or from one identity and
// certificate authority.
type cachedConfig struct {
	secretUID       types.UID
	resourceVersion string
	key             string
	access          *Access
	identity        *libv1beta1.WorkloadIdentity
	authority       []byte
	config          *rest.Config
}

// NewClients returns Clients that read kubeconfigs through hubReader, which should not hold all Secrets of the hub in memory.
// The hub itself is reached through hub.
func NewClients(hubReader client.Reader, hub *rest.Config) *Clients {
	return &Clients{hubReader: hubReader, hub: hub, cache: map[string]cachedConfig{}}
}

// Config returns how to connect to m. It is the same pointer until the kubeconfig changes, or the identity or its certificate authority, or the
// access or its Secret; copy it before changing it. It fails with ErrPull for pull members, and if the kubeconfig is missing, cannot be parsed,
// or would run a program or read a file of the hub; if something that a token for the identity needs is missing; or if the access is not
// complete. Tokens for an identity are asked for when the config is used: requests fail while there is none.
func (c *Clients) Config(ctx context.Context, m Member) (*rest.Config, error) {
	if m.Mode == Pull {
		return nil, fmt.Errorf("connect to %s: %w", m.Key(), ErrPull)
	}
	if m.Access != nil {
		return c.accessed(ctx, m)
	}
	if m.Identity != nil {
		return c.identified(ctx, m)
	}
	if m.KubeconfigSecret == "" {
		return c.hub, nil
	}
	secret := &corev1.Secret{}
	at := types.NamespacedName{Namespace: m.Namespace, Name: m.KubeconfigSecret}
	if err := c.hubReader.Get(ctx, at, secret); err != nil {
		return nil, fmt.Errorf("read kubeconfig of %s: %w", m.Key(), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	have, ok := c.cache[m.Key()]
	if ok && have.identity == nil && have.access == nil && have.secretUID == secret.UID && have.resourceVersion == secret.ResourceVersion && have.key == m.KubeconfigKey {
		return have.config, nil
	}
	config, err := fromSecret(secret, m.KubeconfigKey)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig of %s: %w", m.Key(), err)
	}
	c.cache[m.Key()] = cachedConfig{secretUID: secret.UID, resourceVersion: secret.ResourceVersion, key: m.KubeconfigKey, config: config}
	return config, nil
}

// Forget drops what is known of the member "namespace/name".
func (c *Clients) Forget(member string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.cache, member)
}

func fromSecret(secret *corev1.Secret, key string) (*rest.Config, error) {
	if key == "" {
		keys := make([]string, 0, len(secret.Data))
		for k := range secret.Data {
			keys = append(keys, k)
		}
		if len(keys) == 0 {
			return nil, fmt.Errorf("secret %s/%s is empty", secret.Namespace, secret.Name)
		}
		key = slices.Min(keys)
	}
	raw, ok := secret.Data[key]
	if !ok {
		return nil, fmt.Errorf("secret %s/%s has no key %q", secret.Namespace, secret.Name, key)
	}
	config, err := ParseKubeconfig(raw)
	if err != nil {
		return nil, fmt.Errorf("key %q of secret %s/%s: %w", key, secret.Namespace, secret.Name, err)
	}
	return config, nil
}

// ParseKubeconfig reads a kubeconfig that somebody handed in. It must hold everything itself: one that would run a program, read a
// file of ours or skip the check of the server's certificate is an error.
func ParseKubeconfig(raw []byte) (*rest.Config, error) {
	parsed, err := clientcmd.Load(raw)
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}
	for name, user := range parsed.AuthInfos {
		if err := checkUser(user); err != nil {
			return nil, fmt.Errorf("user %q: %w", name, err)
		}
	}
	for name, cluster := range parsed.Clusters {
		if err := checkCluster(cluster); err != nil {
			return nil, fmt.Errorf("cluster %q: %w", name, err)
		}
	}
	config, err := clientcmd.NewDefaultClientConfig(*parsed, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("parse kubeconfig: %w", err)
	}
	// The member's own priority and fairness limits the rate better than a client can.
	config.QPS = -1
	return config, nil
}

func checkUser(user *clientcmdapi.AuthInfo) error {
	switch {
	case user.Exec != nil:
		return errors.New("exec plugins are not run; use a token or a client certificate")
	case user.AuthProvider != nil:
		return errors.New("auth providers are not supported; use a token or a client certificate")
	case user.TokenFile != "", user.ClientCertificate != "", user.ClientKey != "":
		return errors.New("it refers to a file; embed the data (kubectl config view --flatten)")
	}
	return nil
}

func checkCluster(cluster *clientcmdapi.Cluster) error {
	switch {
	case cluster.CertificateAuthority != "":
		return errors.New("it refers to a file; embed the data (kubectl config view --flatten)")
	case cluster.InsecureSkipTLSVerify:
		return errors.New("insecure-skip-tls-verify is not accepted; embed the certificate authority")
	}
	return CheckProxyURL(cluster.ProxyURL)
}

// CheckProxyURL says what is wrong with the proxy-url of a kubeconfig; "" is none. The error does not quote it, since a password may be in it.
func CheckProxyURL(address string) error {
	if address == "" {
		return nil
	}
	proxy, err := url.Parse(address)
	if err != nil || proxy.Host == "" || !slices.Contains([]string{"http", "https", "socks5"}, proxy.Scheme) {
		return errors.New("its proxy-url is not an http://, https:// or socks5:// address")
	}
	return nil
}
