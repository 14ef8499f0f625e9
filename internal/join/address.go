package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// ErrNoHubAddress says that it is not known under which address agents reach the hub.
var ErrNoHubAddress = errors.New("the address under which agents reach the hub is not known: start the hub with --management-cluster-url and --management-cluster-ca")

// HubAddress is how an agent reaches the hub.
type HubAddress struct {
	// Server is an https URL.
	Server string
	// ServerName is the name that the server's certificate must bear. Default: the host of Server.
	ServerName string
	// CA are the certificates, in PEM, of the authorities that may vouch for the server. Default: those that the agent's
	// image trusts.
	CA []byte
	// ProxyURL is the proxy on the way, if any.
	ProxyURL string
}

// FindHubAddress returns the address that a hub which itself works with the configuration hub tells its agents. Of
// given, what is set goes first; then comes ConfigMap kube-public/cluster-info, then the configuration itself, unless
// it leads to an address inside the cluster. It returns ErrNoHubAddress if there is none.
func FindHubAddress(ctx context.Context, hub *rest.Config, given HubAddress) (HubAddress, error) {
	if given.Server != "" && len(given.CA) > 0 {
		return given, nil
	}
	found, err := publishedAddress(ctx, hub)
	if err != nil {
		return HubAddress{}, err
	}
	if found.Server == "" && (!inCluster(hub) || given.Server != "") {
		if found, err = configuredAddress(hub); err != nil {
			return HubAddress{}, err
		}
	}
	if found = found.merge(given); found.Server == "" {
		return HubAddress{}, ErrNoHubAddress
	}
	return found, nil
}

// publishedAddress reads kube-public/cluster-info; empty if it is not there.
func publishedAddress(ctx context.Context, hub *rest.Config) (HubAddress, error) {
	hub = rest.CopyConfig(hub)
	hub.Timeout = requestTimeout
	clientset, err := kubernetes.NewForConfig(hub)
	if err != nil {
		return HubAddress{}, fmt.Errorf("connect to the hub: %w", err)
	}
	info, err := clientset.CoreV1().ConfigMaps(metav1.NamespacePublic).Get(ctx, "cluster-info", metav1.GetOptions{})
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return HubAddress{}, nil
	}
	if err != nil {
		return HubAddress{}, fmt.Errorf("read ConfigMap kube-public/cluster-info: %w", err)
	}
	config, err := clientcmd.Load([]byte(info.Data["kubeconfig"]))
	if err != nil || len(config.Clusters) != 1 {
		return HubAddress{}, nil //nolint:nilerr // it is not ours, and nobody promised that it is of use
	}
	for _, cluster := range config.Clusters {
		return HubAddress{Server: cluster.Server, ServerName: cluster.TLSServerName, CA: cluster.CertificateAuthorityData}, nil
	}
	return HubAddress{}, nil
}

// configuredAddress reads the hub's address off a configuration for it.
func configuredAddress(hub *rest.Config) (HubAddress, error) {
	address := HubAddress{Server: hub.Host, ServerName: hub.ServerName, CA: hub.CAData}
	if len(address.CA) == 0 && hub.CAFile != "" {
		ca, err := os.ReadFile(hub.CAFile)
		if err != nil {
			return address, fmt.Errorf("read the hub's certificate authority: %w", err)
		}
		address.CA = ca
	}
	return address, nil
}

// inCluster says whether the configuration leads to the address that only pods of the cluster can reach.
func inCluster(hub *rest.Config) bool {
	host := os.Getenv("KUBERNETES_SERVICE_HOST")
	address, err := url.Parse(hub.Host)
	return err == nil && host != "" && address.Host == net.JoinHostPort(host, os.Getenv("KUBERNETES_SERVICE_PORT"))
}

// merge returns a with everything that is set in b laid over it. A certificate authority of b's makes a name of a's
// meaningless.
func (a HubAddress) merge(b HubAddress) HubAddress {
	if len(b.CA) > 0 {
		a.CA, a.ServerName = b.CA, ""
	}
	a.Server, a.ServerName, a.ProxyURL = cmp.Or(b.Server, a.Server), cmp.Or(b.ServerName, a.ServerName), cmp.Or(b.ProxyURL, a.ProxyURL)
	return a
}

// with returns the address for an agent with these options.
func (a HubAddress) with(o AgentOptions) HubAddress {
	return a.merge(HubAddress{Server: o.HubURL, CA: []byte(o.HubCA), ProxyURL: o.ProxyURL})
}

// addressFor is what a registration tells the agent: the address that the registration itself uses, with the options
// laid over it.
func addressFor(hub *rest.Config, o AgentOptions) (HubAddress, error) {
	if hub.Insecure && o.HubCA == "" {
		return HubAddress{}, errors.New("the current kubeconfig does not verify the hub's certificate (insecure-skip-tls-verify), and an agent must: " +
			"give its certificate authority with --management-cluster-ca")
	}
	address, err := configuredAddress(hub)
	return address.with(o), err
}

// kubeconfig returns the agent's kubeconfig for the hub. The context's namespace is where the deliveries are.
func (a HubAddress) kubeconfig(token, delivery string) *clientcmdapi.Config {
	const cluster, context = "local", "sveltos-context"
	config := clientcmdapi.NewConfig()
	config.Clusters[cluster] = &clientcmdapi.Cluster{
		Server: a.Server, TLSServerName: a.ServerName, CertificateAuthorityData: a.CA, ProxyURL: a.ProxyURL,
	}
	config.AuthInfos[agentName] = &clientcmdapi.AuthInfo{Token: token}
	config.Contexts[context] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: agentName, Namespace: delivery}
	config.CurrentContext = context
	return config
}
