package fleet

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet/identity"
)

// AuthorityKey is the key, of the Secret that caSecretRef of an identity names, with the certificate authority in PEM.
const AuthorityKey = "ca.crt"

// identified returns how to connect to a member with the hub's own cloud identity.
func (c *Clients) identified(ctx context.Context, m Member) (*rest.Config, error) {
	authority, err := c.authority(ctx, m)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", m.Key(), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	have, ok := c.cache[m.Key()]
	if ok && equality.Semantic.DeepEqual(have.identity, m.Identity) && bytes.Equal(have.authority, authority) {
		return have.config, nil
	}
	config, err := fromIdentity(m.Identity, authority)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", m.Key(), err)
	}
	c.cache[m.Key()] = cachedConfig{identity: m.Identity.DeepCopy(), authority: authority, config: config}
	return config, nil
}

// authorityAt says where the certificate authority of an identity is.
func authorityAt(m Member) types.NamespacedName {
	ref := m.Identity.CASecretRef
	return types.NamespacedName{Namespace: cmp.Or(ref.Namespace, m.Namespace), Name: ref.Name}
}

// authority reads the certificate authority of an identity; nil stands for those of the system.
func (c *Clients) authority(ctx context.Context, m Member) ([]byte, error) {
	if m.Identity.CASecretRef == nil {
		return nil, nil
	}
	at, secret := authorityAt(m), &corev1.Secret{}
	if err := c.hubReader.Get(ctx, at, secret); err != nil {
		return nil, fmt.Errorf("read spec.workloadIdentity.caSecretRef: %w", err)
	}
	authority, ok := secret.Data[AuthorityKey]
	if !ok {
		return nil, fmt.Errorf("spec.workloadIdentity.caSecretRef: secret %s has no key %q", at, AuthorityKey)
	}
	if _, err := cert.ParseCertsPEM(authority); err != nil {
		return nil, fmt.Errorf("spec.workloadIdentity.caSecretRef: key %q of secret %s: %w", AuthorityKey, at, err)
	}
	return authority, nil
}

func fromIdentity(w *libv1beta1.WorkloadIdentity, authority []byte) (*rest.Config, error) {
	endpoint, err := ParseEndpoint(w.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("spec.workloadIdentity.endpoint: %w", err)
	}
	source, err := identity.New(w, identity.Options{})
	if err != nil {
		return nil, err
	}
	// As with a kubeconfig, the member limits the rate.
	config := &rest.Config{Host: endpoint.String(), TLSClientConfig: rest.TLSClientConfig{CAData: authority}, QPS: -1}
	config.Wrap(source.Wrap(endpoint))
	return config, nil
}

// CheckIdentity says what w lacks, or has wrong, so that nobody could be reached with it. The error names the field.
func CheckIdentity(w *libv1beta1.WorkloadIdentity) error {
	_, err := fromIdentity(w, nil)
	return err
}

// ParseEndpoint reads the address of an API server: an https URL, or a host with or without a port, as clouds show it.
func ParseEndpoint(text string) (*url.URL, error) {
	if !strings.Contains(text, "://") {
		text = "https://" + text
	}
	endpoint, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, fmt.Errorf("it is no address: %w", err)
	case endpoint.Scheme != "https":
		return nil, fmt.Errorf("%q is not an https address: tokens are sent over TLS only", text)
	case endpoint.Hostname() == "":
		return nil, fmt.Errorf("%q names no host", text)
	case endpoint.User != nil || endpoint.RawQuery != "" || endpoint.Fragment != "":
		return nil, errors.New("it may hold a host, a port and a path, and nothing else")
	}
	return endpoint, nil
}
