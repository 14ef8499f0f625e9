package fleet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// AuthorityKey is the key of the PEM certificate authority in the Secret of an identity's caSecretRef.
const AuthorityKey = "ca.crt"

// configFromIdentity returns the client configuration of a member with an Identity.
func (c *Clients) configFromIdentity(ctx context.Context, m Member) (*rest.Config, error) {
	err := c.identity.checkNamespace(m.Namespace)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", m.Key(), err)
	}
	if m.Identity.CASecretRef != nil {
		if config := c.cachedConfigIfCurrent(ctx, m, authoritySecret(m)); config != nil {
			return config, nil
		}
	}
	secret, err := c.readCASecret(ctx, m)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", m.Key(), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	cached, authority := c.cache[m.Key()], secret.Data[AuthorityKey]
	// The authority is compared, not the version of the Secret, so that Config returns the same pointer if only other keys
	// of the Secret change.
	config := cached.config
	if config == nil || !equality.Semantic.DeepEqual(cached.identity, m.Identity) || !bytes.Equal(cached.authority, authority) {
		if config, err = c.newIdentityConfig(m, authority); err != nil {
			return nil, fmt.Errorf("connect to %s: %w", m.Key(), err)
		}
	}
	c.cache[m.Key()] = cachedConfig{
		registration: m.UID, secretUID: secret.UID, resourceVersion: secret.ResourceVersion, key: m.KubeconfigKey,
		identity: m.Identity.DeepCopy(), authority: authority, config: config,
	}
	return config, nil
}

// authoritySecret returns the key of the Secret, in the namespace of the member, with the certificate authority for its
// identity. The identity must have a CASecretRef.
func authoritySecret(m Member) types.NamespacedName {
	return types.NamespacedName{Namespace: m.Namespace, Name: m.Identity.CASecretRef.Name}
}

// readCASecret returns the Secret with the certificate authority of an identity. It returns an empty Secret if the
// identity has none: then the system's authorities apply. The author of a SveltosCluster must not learn about Secrets
// that he may not read. So the Secret must be in the namespace of the member, and all Secrets without a certificate
// authority, also missing ones, have the same error.
func (c *Clients) readCASecret(ctx context.Context, m Member) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	if m.Identity.CASecretRef == nil {
		return secret, nil
	}
	if namespace := m.Identity.CASecretRef.Namespace; namespace != "" && namespace != m.Namespace {
		return nil, fmt.Errorf("spec.workloadIdentity.caSecretRef: the Secret must be in the namespace of the cluster, %s", m.Namespace)
	}
	key := authoritySecret(m)
	if err := c.secrets.Live.Get(ctx, key, secret); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read spec.workloadIdentity.caSecretRef: %w", err)
	}
	if _, err := cert.ParseCertsPEM(secret.Data[AuthorityKey]); err != nil {
		return nil, fmt.Errorf("spec.workloadIdentity.caSecretRef: key %q of Secret %s: there is no certificate in PEM", AuthorityKey, key)
	}
	return secret, nil
}

func (c *Clients) newIdentityConfig(m Member, authority []byte) (*rest.Config, error) {
	w := m.Identity
	endpoint, err := parseIdentity(w)
	if err != nil {
		return nil, err
	}
	// Most endpoints of GKE are IP addresses, which NewTransportWrapper verifies with the GKE API.
	isKnown := c.identity.isKnownHost(w.Provider, endpoint.Hostname())
	if !isKnown && w.Provider != libv1beta1.WorkloadIdentityGCP {
		return nil, fmt.Errorf("spec.workloadIdentity.endpoint: %s is not a host of API servers of %s, and not in the hub's --workload-identity-hosts",
			endpoint.Hostname(), w.Provider)
	}
	wrap, err := c.identity.NewTransportWrapper(w, endpoint, !isKnown)
	if err != nil {
		return nil, err
	}
	// As with a kubeconfig, only the API server of the member limits the rate of requests.
	config := &rest.Config{Host: endpoint.String(), TLSClientConfig: rest.TLSClientConfig{CAData: authority}, QPS: -1}
	config.Wrap(wrap)
	return config, c.LimitConnections(config, m.Namespace)
}

// ValidateIdentity returns an error, which names the field, if w is incomplete or invalid.
func ValidateIdentity(w *libv1beta1.WorkloadIdentity) error {
	_, err := parseIdentity(w)
	return err
}

// parseIdentity validates w and returns its endpoint.
func parseIdentity(w *libv1beta1.WorkloadIdentity) (*url.URL, error) {
	endpoint, err := ParseEndpoint(w.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("spec.workloadIdentity.endpoint: %w", err)
	}
	return endpoint, ValidateProvider(w)
}

// ValidateProvider returns an error, which names the field, if the fields of w for its provider are incomplete or
// invalid.
func ValidateProvider(w *libv1beta1.WorkloadIdentity) error {
	switch w.Provider {
	case libv1beta1.WorkloadIdentityAWS:
		return validateAWS(w.AWS)
	case libv1beta1.WorkloadIdentityAzure:
		return validateAzure(w.Azure)
	case libv1beta1.WorkloadIdentityGCP:
		return nil
	default:
		return fmt.Errorf("spec.workloadIdentity.provider: %q is not supported", w.Provider)
	}
}

func validateAWS(aws *libv1beta1.AWSIdentity) error {
	if aws == nil || aws.ClusterName == "" {
		return errors.New("spec.workloadIdentity.aws.clusterName is missing")
	}
	// The region is part of the host name of STS.
	if aws.Region != "" && !regexp.MustCompile(`^[a-z0-9-]{1,63}$`).MatchString(aws.Region) {
		return fmt.Errorf("spec.workloadIdentity.aws.region: %q is not a region", aws.Region)
	}
	return nil
}

func validateAzure(azure *libv1beta1.AzureIdentity) error {
	if azure == nil || azure.TenantID == "" {
		return errors.New("spec.workloadIdentity.azure.tenantID is missing")
	}
	if azure.ClientID == "" {
		return errors.New("spec.workloadIdentity.azure.clientID is missing")
	}
	return nil
}

// ParseEndpoint parses the address of an API server: an https URL, or a host with or without a port.
func ParseEndpoint(text string) (*url.URL, error) {
	if !strings.Contains(text, "://") {
		text = "https://" + text
	}
	endpoint, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, fmt.Errorf("invalid address: %w", err)
	case endpoint.Scheme != "https":
		return nil, fmt.Errorf("%q is not an https address: tokens are sent over TLS only", text)
	case strings.Contains(endpoint.Hostname(), "%"):
		return nil, fmt.Errorf("%q has an IPv6 zone", text)
	case endpoint.Hostname() == "":
		return nil, fmt.Errorf("%q has no host", text)
	case endpoint.User != nil || endpoint.RawQuery != "" || endpoint.Fragment != "":
		return nil, errors.New("only a host, a port and a path are allowed")
	}
	return endpoint, nil
}
