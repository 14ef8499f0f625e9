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
	// DefaultAgentDeployment is the name of the agent's Deployment.
	DefaultAgentDeployment = "karmada-agent"
	// DefaultDiscoveryTimeout limits each wait of a registration.
	DefaultDiscoveryTimeout = 5 * time.Minute
	// minCertLifetime is the shortest lifetime of a certificate that Kubernetes issues.
	minCertLifetime = 10 * time.Minute
)

// Request is a request to register a pull-mode cluster.
type Request struct {
	// Endpoint is the control plane's host:port, without a scheme.
	Endpoint string
	// Token is the bootstrap token, <id>.<secret>.
	Token string
	// Pins are hashes of public keys, see bootstrap.Discovery. They may be empty only with UnsafeSkipCA.
	Pins         []string
	UnsafeSkipCA bool
	// DiscoveryTimeout limits each wait: for the control plane, for the certificate, and for the agent. It must be
	// positive.
	DiscoveryTimeout time.Duration
	// Member is the configuration for the cluster.
	Member *rest.Config
	// Namespace is the namespace of the agent on the cluster. Default: DefaultNamespace.
	Namespace string
	// ClusterName is the name of the Cluster.
	ClusterName string
	// ClusterNamespace is the namespace of the agent's inventory on the cluster. Default: fleet.DefaultClusterNamespace.
	ClusterNamespace string
	// Provider, Region and Zones are the location of the cluster.
	Provider, Region string
	Zones            []string
	// EnableCertRotation lets the agent renew its certificate.
	EnableCertRotation bool
	// Image is the agent's container image. Default: join.DefaultAgentImage.
	Image string
	// Replicas is the number of replicas of the agent, at least 1; Register does not check it. One of them is the leader.
	Replicas int32
	// CertLifetime is the requested lifetime of the agent's certificate. Default: bootstrap.MaxLife.
	CertLifetime time.Duration
	// ProxyServerAddress is the proxy with which the control plane connects to the cluster.
	ProxyServerAddress string
	// DryRun only runs the preflight checks.
	DryRun bool
	// Renew gives the running agent a new certificate. Fields for the options of the agent are ignored: the agent keeps
	// its options.
	Renew bool
	// Out is called with the lines of the output, Progress with the reasons for waiting. Both are required.
	Out, Progress func(line string)
}

// withDefaults returns r with defaults, and an error if it is not valid.
func (r Request) withDefaults() (Request, error) {
	r.Namespace = cmp.Or(r.Namespace, DefaultNamespace)
	r.ClusterNamespace = cmp.Or(r.ClusterNamespace, fleet.DefaultClusterNamespace)
	r.Image = cmp.Or(r.Image, join.DefaultAgentImage)
	r.CertLifetime = cmp.Or(r.CertLifetime, bootstrap.MaxLife)
	r.Endpoint = strings.TrimSuffix(strings.TrimPrefix(r.Endpoint, "https://"), "/")
	return r, r.validate()
}

func (r Request) validate() error {
	if _, err := bootstrap.ParseToken(r.Token); err != nil {
		return err
	}
	if len(r.Pins) == 0 && !r.UnsafeSkipCA {
		return bootstrap.ErrUnverifiable
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
	if err := r.validateLocation(); err != nil {
		return err
	}
	switch {
	case r.CertLifetime < minCertLifetime:
		return fmt.Errorf("--cert-expiration-seconds must be at least %d, since Kubernetes issues no shorter certificates", int(minCertLifetime.Seconds()))
	case r.CertLifetime > bootstrap.MaxLife:
		return fmt.Errorf("--cert-expiration-seconds must be at most %d, since hubs approve certificates of at most this lifetime", int(bootstrap.MaxLife.Seconds()))
	}
	return nil
}

// validateLocation validates the values that the agent writes to the Cluster.
func (r Request) validateLocation() error {
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
