package source

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// Login has the credentials and the transport options for a chart repository. The zero Login is anonymous and trusts
// the certificate authorities of the system.
type Login struct {
	Username string
	Password string
	// CA has the PEM certificates of the authorities to trust. Default: the authorities of the system.
	CA []byte
	// InsecureSkipTLSVerify accepts any certificate of the server.
	InsecureSkipTLSVerify bool
	// PlainHTTP connects to an OCI registry without TLS.
	PlainHTTP bool
	// PassCredentialsAll sends the login to every host in the URLs of the repository's index.
	PassCredentialsAll bool
	// Hosts are the hosts that may get the login, each with or without a port. Empty: any host.
	Hosts []string
}

// isAllowed returns whether a server may get the login.
func (l Login) isAllowed(server *url.URL) bool {
	return len(l.Hosts) == 0 || slices.Contains(l.Hosts, server.Host) || slices.Contains(l.Hosts, server.Hostname())
}

// allowedHosts returns Login.Hosts for the credentials in a Secret; nil means any host. It fails if they may not be
// sent at all. The author of a profile chooses the Secret and the URL, but may have no access to the Secret. Without
// this rule, the author could send the password of a database in the same namespace to any server.
func allowedHosts(secret *corev1.Secret) ([]string, error) {
	if names, ok := secret.Annotations[kube.AnnotationAllowedHosts]; ok {
		hosts := strings.FieldsFunc(names, func(r rune) bool { return r == ',' || r == ' ' })
		if len(hosts) == 0 {
			return nil, fmt.Errorf("its annotation %s names no host", kube.AnnotationAllowedHosts)
		}
		return hosts, nil
	}
	if secret.Type != libv1beta1.ProfileSecretType {
		return nil, fmt.Errorf("it has the type %q, so its login is not sent to servers: create it with the type %q, or with the annotation %s that names the host",
			secret.Type, libv1beta1.ProfileSecretType, kube.AnnotationAllowedHosts)
	}
	return nil, nil
}

// allowedHostsFor is allowedHosts that fails if the server at address is not allowed.
func allowedHostsFor(secret *corev1.Secret, address string) ([]string, error) {
	hosts, err := allowedHosts(secret)
	if err != nil {
		return nil, err
	}
	server, err := url.Parse(address)
	if err != nil || server.Host == "" {
		return nil, fmt.Errorf("%q is not a URL with a host", redacted(address))
	}
	if !(Login{Hosts: hosts}).isAllowed(server) {
		return nil, fmt.Errorf("its annotation %s does not name %s", kube.AnnotationAllowedHosts, server.Host)
	}
	return hosts, nil
}

// digest identifies the login in cache keys, without its secrets.
func (l Login) digest() string {
	raw, _ := json.Marshal(l) // cannot fail for strings, bytes and bools
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// LoginFor reads the login of an expanded chart from its Secrets on the hub. Their namespace defaults to the cluster's
// namespace. It fails with ErrNotFound if a Secret is missing, and with phase.TerminalError if it has no login for the
// repository or must not be read for the template context.
func LoginFor(ctx context.Context, hub client.Reader, chart configv1beta1.HelmChart, tmplCtx TemplateContext) (Login, error) {
	var login Login
	if chart.Options != nil {
		login.PassCredentialsAll = chart.Options.PassCredentialsAll
	}
	config := chart.RegistryCredentialsConfig
	if config == nil {
		return login, nil
	}
	login.InsecureSkipTLSVerify, login.PlainHTTP = config.InsecureSkipTLSVerify, config.PlainHTTP
	if config.CA != nil {
		secret, err := readSecret(ctx, hub, *config.CA, tmplCtx)
		if err != nil {
			return Login{}, fmt.Errorf("registryCredentialsConfig.ca: %w", err)
		}
		if login.CA = secret.Data["ca.crt"]; len(login.CA) == 0 {
			return Login{}, phase.TerminalErrorf("Secret %s/%s has no key ca.crt", secret.Namespace, secret.Name)
		}
	}
	if config.Credentials != nil {
		secret, err := readSecret(ctx, hub, *config.Credentials, tmplCtx)
		if err != nil {
			return Login{}, fmt.Errorf("registryCredentialsConfig.credentials: %w", err)
		}
		if err := login.readCredentials(secret, config.Key, chart.RepositoryURL); err != nil {
			return Login{}, phase.TerminalErrorf("Secret %s/%s: %w", secret.Namespace, secret.Name, err)
		}
	}
	return login, nil
}

// readSecret returns the Secret of ref on the hub. It fails with ErrNotFound, or like ResolveSecretRef.
func readSecret(ctx context.Context, hub client.Reader, ref corev1.SecretReference, tmplCtx TemplateContext) (*corev1.Secret, error) {
	reference, err := ResolveSecretRef(ref, tmplCtx)
	if err != nil {
		return nil, err
	}
	key := client.ObjectKey{Namespace: reference.Namespace, Name: reference.Name}
	var secret corev1.Secret
	if err := hub.Get(ctx, key, &secret); apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("Secret %s %w", key, ErrNotFound) //nolint:staticcheck // a kind is a name
	} else if err != nil {
		return nil, fmt.Errorf("read Secret %s: %w", key, err)
	}
	return &secret, nil
}

// readCredentials sets the user name and the password for repositoryURL from secret. A Docker configuration has the
// host of each login, so it needs no annotation. Errors never contain data of the Secret.
func (l *Login) readCredentials(secret *corev1.Secret, key, repositoryURL string) (err error) {
	if user, ok := secret.Data[corev1.BasicAuthUsernameKey]; ok && key == "" {
		l.Username, l.Password = string(user), string(secret.Data[corev1.BasicAuthPasswordKey])
		l.Hosts, err = allowedHostsFor(secret, repositoryURL)
		return err
	}
	host, err := registryHost(repositoryURL)
	if err != nil {
		return err
	}
	l.Hosts = []string{host}
	l.Username, l.Password, err = dockerLogin(secret, key, repositoryURL, host)
	return err
}

// dockerLogin returns the login for repositoryURL, whose host is host, from the Docker configuration in a Secret. Of
// several logins for the host, it returns the login whose path is the longest prefix of the repository's, and the first
// by key if no path is a prefix.
func dockerLogin(secret *corev1.Secret, key, repositoryURL, host string) (username, password string, err error) {
	raw, key := findDockerConfig(secret, key)
	if raw == nil {
		return "", "", fmt.Errorf("no key %q, and no keys username and password", cmp.Or(key, corev1.DockerConfigJsonKey))
	}
	var config struct {
		Auths map[string]struct {
			Username string `json:"username"`
			Password string `json:"password"`
			Auth     string `json:"auth"`
		} `json:"auths"`
	}
	if json.Unmarshal(raw, &config) != nil {
		return "", "", fmt.Errorf("key %q is not a Docker configuration in JSON", key)
	}
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(config.Auths)), func(name string) bool {
		named, err := registryHost(name)
		return err != nil || named != host
	})
	if len(names) == 0 {
		return "", "", fmt.Errorf("key %q has no login for %s", key, host)
	}
	slices.SortStableFunc(names, func(a, b string) int {
		return cmp.Compare(matchedPathLength(b, repositoryURL), matchedPathLength(a, repositoryURL))
	})
	auth := config.Auths[names[0]]
	if auth.Username != "" {
		return auth.Username, auth.Password, nil
	}
	decoded, err := base64.StdEncoding.DecodeString(auth.Auth)
	user, pass, found := strings.Cut(string(decoded), ":")
	if err != nil || !found {
		return "", "", fmt.Errorf("key %q has an invalid login for %s", key, host)
	}
	return user, pass, nil
}

// matchedPathLength returns the length of the path in name, the key of a Docker configuration, or -1 if repositoryURL
// is not below it. The path /v1 or /v2 is the version of Docker's API, and counts as empty.
func matchedPathLength(name, repositoryURL string) int {
	path := repositoryPath(name)
	switch {
	case path == "" || path == "/v1" || path == "/v2":
		return 0
	case strings.HasPrefix(repositoryPath(repositoryURL)+"/", path+"/"):
		return len(path)
	}
	return -1
}

// repositoryPath returns the path of a URL, or of an address without a scheme, without a slash at the end.
func repositoryPath(address string) string {
	if _, rest, hasScheme := strings.Cut(address, "://"); hasScheme {
		address = rest
	}
	_, path, _ := strings.Cut(address, "/")
	return strings.TrimRight("/"+path, "/")
}

// findDockerConfig returns the Docker configuration in a Secret and its key, nil if there is none. key is the key to
// use, or "".
func findDockerConfig(secret *corev1.Secret, key string) (raw []byte, found string) {
	if key != "" {
		return secret.Data[key], key
	}
	for _, name := range []string{corev1.DockerConfigJsonKey, "config.json"} {
		if raw, ok := secret.Data[name]; ok {
			return raw, name
		}
	}
	if len(secret.Data) == 1 {
		for name, raw := range secret.Data {
			return raw, name
		}
	}
	return nil, ""
}

// hostName matches names of hosts, and IPv4 addresses. Some private networks have names with an underscore.
var hostName = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?$`)

// hasHost returns whether the host of a URL is a name or an IP address. Package url accepts more.
func hasHost(address *url.URL) bool {
	if strings.HasPrefix(address.Host, "[") {
		_, err := netip.ParseAddr(address.Hostname())
		return err == nil
	}
	return hostName.MatchString(address.Hostname())
}

// registryHost returns the host and port of a URL or of the key of a Docker configuration, with or without a scheme.
func registryHost(address string) (string, error) {
	if !strings.Contains(address, "://") {
		address = "https://" + address
	}
	parsed, err := url.Parse(address)
	if err != nil || !hasHost(parsed) {
		return "", fmt.Errorf("%q is not the address of a registry", redacted(address))
	}
	// Docker's registry has another host name than the one in image references.
	if parsed.Host == "index.docker.io" || parsed.Host == "docker.io" {
		return "registry-1.docker.io", nil
	}
	return strings.TrimSuffix(parsed.Host, ":"), nil // an empty port is the default one
}
