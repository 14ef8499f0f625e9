package source

import (
	"cmp"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/phase"
)

// KindURL is the kind of a Reference to the content behind a URL.
const KindURL = "URL"

const (
	// defaultRemoteInterval is the default of remoteURL.interval. minRemoteInterval is the shortest interval.
	defaultRemoteInterval = 5 * time.Minute
	minRemoteInterval     = time.Second
)

// The schemes of remote sources.
const (
	schemeHTTP     = "http"
	schemeHTTPS    = "https"
	schemeOCI      = "oci"
	schemeGitHTTP  = "git+http"
	schemeGitHTTPS = "git+https"
	schemeGitSSH   = "git+ssh"
)

// RemoteUse is a URL of one user, with the interval at which the user needs it to be fetched.
type RemoteUse struct {
	Reference Reference
	Interval  time.Duration
}

// ResolveRemoteUse is ResolveRemoteSource with the interval of the source.
func ResolveRemoteUse(remote libv1beta1.RemoteSource, tmplCtx TemplateContext) (RemoteUse, error) {
	reference, err := ResolveRemoteSource(remote, tmplCtx)
	if err != nil {
		return RemoteUse{}, err
	}
	interval := defaultRemoteInterval
	if remote.Interval != nil {
		interval = max(remote.Interval.Duration, minRemoteInterval)
	}
	return RemoteUse{Reference: reference, Interval: interval}, nil
}

// ResolveRemoteSource expands the templates in the URL and the secretRef of a remote source for the template context.
// All errors are phase.TerminalError, for example if TemplateContext.RestrictedNamespace does not allow the namespace
// of the Secret.
func ResolveRemoteSource(remote libv1beta1.RemoteSource, tmplCtx TemplateContext) (Reference, error) {
	address, err := tmplCtx.Expand("remoteURL.url", remote.URL)
	if err != nil {
		return Reference{}, err
	}
	if err := checkRemote(address, remote); err != nil {
		return Reference{}, phase.TerminalErrorf("remoteURL.url %s: %w", redactedRemote(address), err)
	}
	reference := Reference{
		Kind: KindURL, URL: address, InsecureSkipTLSVerify: remote.InsecureSkipTLSVerify, PlainHTTP: remote.PlainHTTP,
	}
	if remote.SecretRef != nil {
		secret, err := ResolveSecretRef(*remote.SecretRef, tmplCtx)
		if err != nil {
			return Reference{}, fmt.Errorf("remoteURL.secretRef: %w", err)
		}
		reference.Namespace, reference.Name = secret.Namespace, secret.Name
	}
	return reference, nil
}

// Origin returns the kind, the namespace and the name of r for the status and for annotations. The name of a URL is the
// URL without credentials, and its namespace is "".
func (r Reference) Origin() (kind, namespace, name string) {
	if r.Kind == KindURL {
		return r.Kind, "", redactedRemote(r.URL)
	}
	return r.Kind, r.Namespace, r.Name
}

// LoginSecret returns the reference to the Secret with the login for a URL, and false if there is none.
func (r Reference) LoginSecret() (Reference, bool) {
	return Reference{Kind: kindSecret, Namespace: r.Namespace, Name: r.Name}, r.Kind == KindURL && r.Name != ""
}

// secretRef returns LoginSecret as an API type.
func (r Reference) secretRef() corev1.SecretReference {
	return corev1.SecretReference{Namespace: r.Namespace, Name: r.Name}
}

// checkRemote returns an error if the URL cannot be fetched, or if an option has no effect for it.
func checkRemote(address string, remote libv1beta1.RemoteSource) error {
	parsed, err := url.Parse(address)
	if err != nil || parsed.Host == "" {
		return fmt.Errorf("it is not a URL with a host")
	}
	if strings.Contains(parsed.Host, "%") {
		return fmt.Errorf("its host has an IPv6 zone, which is for link-local addresses only")
	}
	schemes := []string{schemeHTTP, schemeHTTPS, schemeOCI, schemeGitHTTP, schemeGitHTTPS, schemeGitSSH}
	if !slices.Contains(schemes, parsed.Scheme) {
		return fmt.Errorf("its scheme is none of %s", strings.Join(schemes, ", "))
	}
	if _, hasPassword := parsed.User.Password(); hasPassword || parsed.User != nil && parsed.Scheme != schemeGitSSH {
		return fmt.Errorf("it has credentials, which belong in the Secret of secretRef")
	}
	if remote.PlainHTTP && parsed.Scheme != schemeOCI && parsed.Scheme != schemeHTTP {
		return fmt.Errorf("plainHTTP is for oci:// only")
	}
	if parsed.Scheme == schemeGitSSH {
		if remote.InsecureSkipTLSVerify {
			return fmt.Errorf("insecureSkipTLSVerify has no effect: the host key must be in known_hosts of the Secret")
		}
		if remote.SecretRef == nil {
			return fmt.Errorf("secretRef is required, with a Secret with the keys identity and known_hosts")
		}
	}
	if isGit(parsed.Scheme) {
		_, err = parseGitAddress(address)
	}
	return err
}

func isGit(scheme string) bool { return strings.HasPrefix(scheme, "git+") }

// gitAddress is a parsed URL of a Git repository.
type gitAddress struct {
	// url is the URL of the repository, with the scheme http, https or ssh.
	url *url.URL
	// ref is a branch, a tag, a full name of a reference, or the hash of a commit. "" is the default branch.
	ref string
	// directory is the clean path of the tree to read, "" for the whole repository.
	directory string
}

func parseGitAddress(address string) (gitAddress, error) {
	parsed, err := url.Parse(address)
	if err != nil {
		return gitAddress{}, fmt.Errorf("it is not a URL")
	}
	query, err := url.ParseQuery(parsed.RawQuery)
	if err != nil {
		return gitAddress{}, fmt.Errorf("its parameters are invalid")
	}
	for name := range query {
		if name != "ref" && name != "path" || len(query[name]) > 1 {
			return gitAddress{}, fmt.Errorf("its parameters can only be ref and path, each once")
		}
	}
	git := gitAddress{url: parsed, ref: query.Get("ref")}
	if directory := strings.Trim(query.Get("path"), "/"); directory != "" && directory != "." {
		if git.directory, err = archive.CleanPath(directory); err != nil {
			return gitAddress{}, fmt.Errorf("its path %w", err)
		}
	}
	git.url.Scheme = strings.TrimPrefix(git.url.Scheme, "git+")
	git.url.RawQuery, git.url.Fragment = "", ""
	return git, nil
}

// redactedRemote returns a URL for messages, without parts that can be credentials. A Git URL keeps the parameters path
// and ref. For an invalid URL it returns a text that can follow the word URL.
func redactedRemote(address string) string {
	public, ok := withoutCredentials(address)
	if !ok {
		return "that cannot be parsed"
	}
	if isGit(public.Scheme) {
		public.RawQuery = gitParameters(address).Encode()
	}
	return public.String()
}

// gitParameters returns the parameters path and ref of the URL of a Git repository.
func gitParameters(address string) url.Values {
	parameters := url.Values{}
	if parsed, err := url.Parse(address); err == nil {
		for _, name := range []string{"path", "ref"} {
			if value := parsed.Query().Get(name); value != "" {
				parameters.Set(name, value)
			}
		}
	}
	return parameters
}

// fileName returns the name of the file behind a URL. A name without the extension of a manifest gets one.
func fileName(address *url.URL) string {
	name := cmp.Or(path.Base(path.Clean("/"+address.Path)), "/")
	if name == "/" {
		name = "manifest"
	}
	if !hasManifestExtension(name) {
		name += ".yaml"
	}
	return name
}
