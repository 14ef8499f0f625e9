package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// requestTimeout limits the read of cluster-info.
const requestTimeout = 15 * time.Second

// ErrNoHubAddress is returned if no address of the hub for agents is known.
var ErrNoHubAddress = errors.New("the address under which agents reach the hub is not known: start the hub with --management-cluster-url and --management-cluster-ca")

// HubAddress has the parameters of an agent's connection to the hub, without credentials.
type HubAddress struct {
	// Server is an https URL.
	Server string
	// ServerName is the required name in the server's certificate. Default: the host of Server.
	ServerName string
	// CA are the CA certificates, in PEM, with which the agent verifies the server's certificate. Default: the CA
	// certificates of the agent's image.
	CA []byte
	// ProxyURL is the proxy for connections to the hub, "" for none.
	ProxyURL string
}

// FindHubAddress returns the default address of the hub for agents: given, else the address in ConfigMap
// kube-public/cluster-info, else the address in the hub's own configuration, unless that is in-cluster. Each set field
// of given replaces the field of the address that was found. If given has a Server but no CA, the CA of an in-cluster
// configuration is used, too. configMaps reads ConfigMaps of the hub. FindHubAddress returns ErrNoHubAddress if there
// is no address.
func FindHubAddress(ctx context.Context, configMaps client.Reader, hub *rest.Config, given HubAddress) (HubAddress, error) {
	if given.Server != "" && len(given.CA) > 0 {
		return given, nil
	}
	found, err := publishedAddress(ctx, configMaps)
	if err != nil {
		return HubAddress{}, err
	}
	if found.Server == "" && (!isInCluster(hub) || given.Server != "") {
		if found, err = configuredAddress(hub); err != nil {
			return HubAddress{}, err
		}
	}
	if found = found.merge(given); found.Server == "" {
		return HubAddress{}, ErrNoHubAddress
	}
	return found, nil
}

// publishedAddress returns the address in ConfigMap kube-public/cluster-info, or an empty one if the ConfigMap is
// missing, forbidden or invalid.
func publishedAddress(ctx context.Context, configMaps client.Reader) (HubAddress, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	info := &corev1.ConfigMap{}
	err := configMaps.Get(ctx, client.ObjectKey{Namespace: metav1.NamespacePublic, Name: "cluster-info"}, info)
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return HubAddress{}, nil
	}
	if err != nil {
		return HubAddress{}, fmt.Errorf("read ConfigMap kube-public/cluster-info: %w", err)
	}
	config, err := clientcmd.Load([]byte(info.Data["kubeconfig"]))
	if err != nil || len(config.Clusters) != 1 {
		return HubAddress{}, nil // other tools write this ConfigMap
	}
	for _, cluster := range config.Clusters {
		return HubAddress{Server: cluster.Server, ServerName: cluster.TLSServerName, CA: cluster.CertificateAuthorityData}, nil
	}
	return HubAddress{}, nil
}

// configuredAddress returns the address in a configuration, without its proxy, and with the content of its CA file.
func configuredAddress(config *rest.Config) (HubAddress, error) {
	config = rest.CopyConfig(config)
	config.CertFile, config.KeyFile = "", "" // LoadTLSFiles would read them, too
	err := rest.LoadTLSFiles(config)
	if err != nil {
		err = fmt.Errorf("read the certificate authority of %s: %w", config.Host, err)
	}
	return HubAddress{Server: config.Host, ServerName: config.ServerName, CA: config.CAData}, err
}

// isInCluster returns whether hub has the API server's address for pods, which agents in other clusters cannot reach.
func isInCluster(hub *rest.Config) bool {
	host := os.Getenv("KUBERNETES_SERVICE_HOST")
	address, err := url.Parse(hub.Host)
	return err == nil && host != "" && address.Host == net.JoinHostPort(host, os.Getenv("KUBERNETES_SERVICE_PORT"))
}

// merge returns a with the fields that are set in b. A new CA clears the ServerName of a.
func (a HubAddress) merge(b HubAddress) HubAddress {
	if len(b.CA) > 0 {
		a.CA, a.ServerName = b.CA, ""
	}
	a.Server, a.ServerName, a.ProxyURL = cmp.Or(b.Server, a.Server), cmp.Or(b.ServerName, a.ServerName), cmp.Or(b.ProxyURL, a.ProxyURL)
	return a
}

func (a HubAddress) withOptions(o AgentOptions) HubAddress {
	return a.merge(HubAddress{Server: o.HubURL, CA: []byte(o.HubCA), ProxyURL: o.ProxyURL})
}

// addressFor returns the hub's address for an agent with these options. hub is the configuration of the user who
// registers the cluster. It must verify the hub's certificate, or o must have a HubCA.
func addressFor(hub *rest.Config, o AgentOptions) (HubAddress, error) {
	if hub.Insecure && o.HubCA == "" {
		return HubAddress{}, errors.New("the current kubeconfig does not verify the hub's certificate (insecure-skip-tls-verify), and an agent must: " +
			"give its certificate authority with --management-cluster-ca")
	}
	address, err := configuredAddress(hub)
	return address.withOptions(o), err
}

// Kubeconfig returns the agent's kubeconfig for the hub. The namespace of its context is the delivery namespace.
func (a HubAddress) Kubeconfig(token, delivery string) *clientcmdapi.Config {
	return tokenKubeconfig(a.clusterEntry(), agentName, token, delivery)
}

func (a HubAddress) clusterEntry() *clientcmdapi.Cluster {
	return &clientcmdapi.Cluster{Server: a.Server, TLSServerName: a.ServerName, CertificateAuthorityData: a.CA, ProxyURL: a.ProxyURL}
}
