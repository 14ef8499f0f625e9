package register

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
)

const (
	// DefaultNamespace is the namespace of the agent on the cluster.
	DefaultNamespace = "karmada-system"
	// DefaultAgentName is the name of the agent's Deployment.
	DefaultAgentName = "karmada-agent"
	// DefaultDiscoveryTimeout is how long each of the waits of a registration may take.
	DefaultDiscoveryTimeout = 5 * time.Minute
	// DefaultCertLife is the life to ask for of the agent's certificate.
	DefaultCertLife = 365 * 24 * time.Hour
	// minCertLife is the shortest life of a certificate that Kubernetes lets anybody ask for.
	minCertLife = 10 * time.Minute
)

// Request asks to register a cluster in pull mode, from beside the cluster.
type Request struct {
	// Endpoint is the control plane's host:port, without a scheme.
	Endpoint string
	// Token is the bootstrap token, <id>.<secret>.
	Token string
	// Pins are what is known of the control plane's certificate authorities, each "sha256:<hex>". UnsafeSkipCA does
	// without any.
	Pins         []string
	UnsafeSkipCA bool
	// DiscoveryTimeout is how long each wait may take: for the control plane, for the certificate, and for the agent.
	// Default: DefaultDiscoveryTimeout.
	DiscoveryTimeout time.Duration
	// Member is the way to the cluster from here.
	Member *rest.Config
	// Namespace is that of the agent on the cluster. Default: DefaultNamespace.
	Namespace string
	// ClusterName is the name of the Cluster.
	ClusterName string
	// ClusterNamespace is handed on to the agent. Default: fleet.DefaultClusterNamespace.
	ClusterNamespace string
	// Provider, Region and Zones say where the cluster is.
	Provider, Region string
	Zones            []string
	// EnableCertRotation lets the agent renew its certificate.
	EnableCertRotation bool
	// Image is the agent's container image. Default: join.DefaultAgentImage.
	Image string
	// Replicas of the agent; one of them works, the others wait. Default 1.
	Replicas int32
	// CertLife is the life to ask for of the agent's certificate. Default: DefaultCertLife.
	CertLife time.Duration
	// ProxyServerAddress is the proxy that the control plane is to use on the way to the cluster.
	ProxyServerAddress string
	// DryRun only runs the checks of the cluster.
	DryRun bool
	// Renew gives the agent of this cluster, which is there already, a new certificate.
	Renew bool
	// Out is told the lines of the result, Progress what is being waited for.
	Out, Progress func(line string)
}

// withDefaults returns r with its defaults filled in, or what is wrong with it.
func (r Request) withDefaults() (Request, error) {
	r.DiscoveryTimeout = cmp.Or(r.DiscoveryTimeout, DefaultDiscoveryTimeout)
	r.Namespace = cmp.Or(r.Namespace, DefaultNamespace)
	r.ClusterNamespace = cmp.Or(r.ClusterNamespace, fleet.DefaultClusterNamespace)
	r.Image = cmp.Or(r.Image, join.DefaultAgentImage)
	r.Replicas = cmp.Or(r.Replicas, 1)
	r.CertLife = cmp.Or(r.CertLife, DefaultCertLife)
	r.Endpoint = strings.TrimSuffix(strings.TrimPrefix(r.Endpoint, "https://"), "/")
	if r.Out == nil {
		r.Out = func(string) {}
	}
	if r.Progress == nil {
		r.Progress = func(string) {}
	}
	return r, r.validate()
}

func (r Request) validate() error {
	if r.Token == "" {
		return errors.New("token is required")
	}
	if _, err := bootstrap.ParseToken(r.Token); err != nil {
		return err
	}
	if len(r.Pins) == 0 && !r.UnsafeSkipCA {
		return errors.New("need to verify CACertHashes, or set --discovery-token-unsafe-skip-ca-verification=true")
	}
	if err := karmada.ValidateName(r.ClusterName); err != nil {
		return err
	}
	address, err := url.Parse("https://" + r.Endpoint)
	if err != nil || address.Host != r.Endpoint || address.Hostname() == "" {
		return fmt.Errorf("the endpoint of the control plane must be <host>:<port>, and it is %q", r.Endpoint)
	}
	if err := errors.Join(checkNamespace("--namespace", r.Namespace), checkNamespace("--cluster-namespace", r.ClusterNamespace)); err != nil {
		return err
	}
	if err := r.validatePlace(); err != nil {
		return err
	}
	switch {
	case r.Member == nil:
		return errors.New("the way to the cluster is not given")
	case r.DiscoveryTimeout < 0:
		return errors.New("--discovery-timeout must be positive")
	case r.CertLife < minCertLife:
		return fmt.Errorf("--cert-expiration-seconds must be at least %d, since Kubernetes issues no shorter certificates", int(minCertLife.Seconds()))
	case r.Replicas < 0:
		return errors.New("--karmada-agent-replicas must be at least 1")
	}
	return nil
}

// validatePlace checks what the agent writes into the Cluster, which would not take it.
func (r Request) validatePlace() error {
	if err := fleet.ValidateProxyURL(r.ProxyServerAddress); err != nil {
		return fmt.Errorf("--proxy-server-address: %w", err)
	}
	given := []struct{ flag, value string }{{"--cluster-provider", r.Provider}, {"--cluster-region", r.Region}}
	for _, zone := range r.Zones {
		given = append(given, struct{ flag, value string }{"--cluster-zones", zone})
	}
	for _, g := range given {
		if problems := validation.IsValidLabelValue(g.value); len(problems) > 0 {
			return fmt.Errorf("%s: %q cannot be the value of a label: %s", g.flag, g.value, problems[0])
		}
	}
	return nil
}

func checkNamespace(flag, namespace string) error {
	if problems := validation.IsDNS1123Label(namespace); len(problems) > 0 {
		return fmt.Errorf("%s: %q is not the name of a namespace: %s", flag, namespace, problems[0])
	}
	return nil
}
