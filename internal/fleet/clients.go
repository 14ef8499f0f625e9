package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/transport"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/kube"
)

// ErrPull is the error of Clients.Config for a pull member, which accepts no connections.
var ErrPull = errors.New("a pull member cannot be dialled")

// Clients returns and caches the client configurations of push members. Create it with NewClients. Its methods may be
// called concurrently.
type Clients struct {
	// Wrap wraps the transports to all members but the hub; nil wraps none. Set it before the first use.
	Wrap transport.WrapperFunc

	secrets   SecretReaders
	hubConfig *rest.Config
	identity  IdentityPolicy
	egress    *egress.Policy
	// responseMemory limits the memory for the responses of members. recordMemory limits the memory for inventory records
	// and for the parts of nodes and pods that package clusterstatus counts.
	responseMemory, recordMemory *kube.ResponseMemory

	// mu guards cache.
	mu    sync.Mutex
	cache map[string]cachedConfig
}

// SecretReaders read the Secrets on the hub that hold the credentials of members.
type SecretReaders struct {
	// Live reads Secrets from the API server.
	Live client.Reader
	// Metadata reads the metadata of all Secrets from an informer cache. If it is nil, each call of Config reads the
	// Secret from Live.
	Metadata client.Reader
}

// cachedConfig is a configuration with the inputs that it was built from. It is valid while they are the same.
type cachedConfig struct {
	config *rest.Config
	// registration is Member.UID. After another registration under the same name, the cached metadata can still be of the
	// old Secret: without this field, the configuration of the old cluster would be returned.
	registration string
	// secretUID and resourceVersion identify the version of the Secret, if there is one. key is Member.KubeconfigKey.
	secretUID       types.UID
	resourceVersion string
	key             string
	// access is Member.Access.
	access *Access
	// identity is Member.Identity, and authority the certificate authority for it, in PEM.
	identity  *libv1beta1.WorkloadIdentity
	authority []byte
}

// NewClients returns Clients that read Secrets through secrets. hubConfig is the configuration for the hub itself, the
// member HubNamespace/HubName. It must be nil if the hub does not register itself: otherwise a user who may create this
// SveltosCluster gets the permissions of the hub. identity limits the members with a cloud identity. policy limits the
// connections to all members but the hub.
func NewClients(secrets SecretReaders, hubConfig *rest.Config, identity IdentityPolicy, policy *egress.Policy) *Clients {
	responses, records := newMemory()
	return &Clients{secrets: secrets, hubConfig: hubConfig, identity: identity, egress: policy, responseMemory: responses, recordMemory: records, cache: map[string]cachedConfig{}}
}

// Config returns the client configuration of m. It returns the same pointer until one of its inputs changes: the
// kubeconfig, the identity and its certificate authority, or the access and its Secret. Copy it before changing it.
//
// It returns the cached configuration if the metadata cache has the version of the Secret that the configuration was
// built from. Otherwise it reads the Secret from the API server. So after a change or the deletion of a Secret, the
// former credentials are returned until the watch has updated the metadata cache. The member itself rejects credentials
// that were revoked.
//
// It fails with ErrPull for pull members. It also fails if the kubeconfig is missing or invalid, or refers to a program
// or a file, or if the identity or the access is incomplete. Tokens of an identity are requested when the configuration
// is used: requests fail while there is no token.
func (c *Clients) Config(ctx context.Context, m Member) (*rest.Config, error) {
	if m.Mode == Pull {
		return nil, fmt.Errorf("connect to %s: %w", m.Key(), ErrPull)
	}
	if m.Access != nil {
		return c.configFromAccess(ctx, m)
	}
	if m.Identity != nil {
		return c.configFromIdentity(ctx, m)
	}
	if m.KubeconfigSecret == "" {
		if c.hubConfig == nil {
			return nil, fmt.Errorf("connect to %s: the hub manages its own cluster only with --register-self", m.Key())
		}
		return c.hubConfig, nil
	}
	return c.configFromKubeconfig(ctx, m)
}

// configFromKubeconfig returns the client configuration of a member with a kubeconfig.
func (c *Clients) configFromKubeconfig(ctx context.Context, m Member) (*rest.Config, error) {
	key := types.NamespacedName{Namespace: m.Namespace, Name: m.KubeconfigSecret}
	if config := c.cachedConfigIfCurrent(ctx, m, key); config != nil {
		return config, nil
	}
	secret := &corev1.Secret{}
	if err := c.secrets.Live.Get(ctx, key, secret); err != nil {
		return nil, fmt.Errorf("read kubeconfig of %s: %w", m.Key(), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if config := c.lookUpCached(m, secret); config != nil {
		return config, nil
	}
	config, err := configFromSecret(secret, m.KubeconfigKey)
	if err == nil {
		err = c.LimitConnections(config, m.Namespace)
	}
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig of %s: %w", m.Key(), err)
	}
	c.cache[m.Key()] = cachedConfig{
		registration: m.UID, secretUID: secret.UID, resourceVersion: secret.ResourceVersion, key: m.KubeconfigKey, config: config,
	}
	return config, nil
}

// cachedConfigIfCurrent returns the cached configuration of m if it was built from the version of the Secret that the
// cached metadata has. It returns nil if the caller must read the Secret.
func (c *Clients) cachedConfigIfCurrent(ctx context.Context, m Member, secret types.NamespacedName) *rest.Config {
	if c.secrets.Metadata == nil {
		return nil
	}
	metadata := &metav1.PartialObjectMetadata{}
	metadata.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	if err := c.secrets.Metadata.Get(ctx, secret, metadata, client.UnsafeDisableDeepCopy); err != nil {
		return nil // the read of the Secret returns the error
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lookUpCached(m, metadata)
}

// lookUpCached returns the cached configuration of m if it was built from this version of the Secret and from the
// fields of m, else nil. The caller must hold mu.
func (c *Clients) lookUpCached(m Member, secret metav1.Object) *rest.Config {
	cached := c.cache[m.Key()]
	if cached.registration != m.UID || cached.secretUID != secret.GetUID() || cached.resourceVersion != secret.GetResourceVersion() ||
		cached.key != m.KubeconfigKey || !equality.Semantic.DeepEqual(cached.access, m.Access) || !equality.Semantic.DeepEqual(cached.identity, m.Identity) {
		return nil
	}
	return cached.config
}

// Forget removes the member "namespace/name" from the cache.
func (c *Clients) Forget(member string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.cache, member)
}

// configFromSecret parses the kubeconfig in a key of a Secret, "" for the first key.
func configFromSecret(secret *corev1.Secret, key string) (*rest.Config, error) {
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

// LoadKubeconfig decodes an untrusted kubeconfig without validating it, see ParseKubeconfig. Its error has a line
// number, but no text of the kubeconfig: errors of the YAML parser quote text, which can be a password.
func LoadKubeconfig(raw []byte) (*clientcmdapi.Config, error) {
	if err := kube.CheckValueCount(raw); err != nil {
		return nil, err
	}
	parsed, err := clientcmd.Load(raw)
	if err == nil {
		return parsed, nil
	}
	line := regexp.MustCompile(`\bline [0-9]+`).FindString(err.Error())
	if line == "" {
		return nil, errors.New("it is not a kubeconfig")
	}
	return nil, fmt.Errorf("it is not a kubeconfig: there is an error in or near %s", line)
}

// ParseKubeconfig decodes and validates an untrusted kubeconfig, and returns the configuration of its current context.
// It fails if the kubeconfig would run a program, read a local file, or skip the verification of the certificate of the
// server.
func ParseKubeconfig(raw []byte) (*rest.Config, error) {
	parsed, err := LoadKubeconfig(raw)
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
	// client-go connects without TLS if there is neither a scheme nor a certificate.
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil || server.Scheme != "https" {
		return nil, errors.New("its server is not an https address")
	}
	config.Host = server.String()
	// No client-side rate limit: the API priority and fairness of the member limits the rate better.
	config.QPS = -1
	return config, nil
}

func checkUser(user *clientcmdapi.AuthInfo) error {
	switch {
	case user.Exec != nil:
		return fmt.Errorf("exec plugins are not supported, but it runs the program %q; use a token or a client certificate", user.Exec.Command)
	case user.AuthProvider != nil:
		return fmt.Errorf("auth provider %q is not supported; use a token or a client certificate", user.AuthProvider.Name)
	}
	return cmp.Or(
		checkEmbedded("client-certificate", user.ClientCertificate),
		checkEmbedded("client-key", user.ClientKey),
		checkEmbedded("tokenFile", user.TokenFile),
	)
}

func checkCluster(cluster *clientcmdapi.Cluster) error {
	if cluster.InsecureSkipTLSVerify {
		return errors.New("it does not verify the server's certificate (insecure-skip-tls-verify); embed the certificate authority")
	}
	return cmp.Or(ValidateProxyURL(cluster.ProxyURL), checkEmbedded("certificate-authority", cluster.CertificateAuthority))
}

// checkEmbedded returns an error if a field of a kubeconfig is the path of a file instead of embedded data.
func checkEmbedded(field, path string) error {
	if path == "" {
		return nil
	}
	return fmt.Errorf("it refers to a file: its %s is the file %q; files are not read; embed the content with: "+
		"kubectl config view --flatten --minify --raw", field, path)
}

// ValidateProxyURL returns an error unless address is a valid proxy-url of a kubeconfig, or "" for none. The error does
// not contain the address, which may have a password.
func ValidateProxyURL(address string) error {
	if address == "" {
		return nil
	}
	proxy, err := url.Parse(address)
	if err != nil || proxy.Host == "" || !slices.Contains([]string{"http", "https", "socks5"}, proxy.Scheme) {
		return errors.New("its proxy-url is not an http://, https:// or socks5:// address")
	}
	return nil
}
