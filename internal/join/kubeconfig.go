package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// localCluster is the name of the cluster in the kubeconfigs that we make.
const localCluster = "local"

// accessTimeout is how long a member may take to answer while it is being registered.
const accessTimeout = 10 * time.Second

// parseKubeconfig reads the current context of a kubeconfig for the hub, and returns it without the other contexts,
// whose credentials the hub does not need. It returns an error if the context refers to files or programs.
func parseKubeconfig(kubeconfig []byte) (config *rest.Config, minified []byte, err error) {
	loaded, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, nil, fmt.Errorf("it is not a kubeconfig: %w", err)
	}
	if loaded.Contexts[loaded.CurrentContext] == nil {
		return nil, nil, fmt.Errorf("its current-context %q is not among its contexts", loaded.CurrentContext)
	}
	if err := clientcmdapi.MinifyConfig(loaded); err != nil {
		return nil, nil, fmt.Errorf("read its current context: %w", err)
	}
	if minified, err = clientcmd.Write(*loaded); err != nil {
		return nil, nil, fmt.Errorf("encode its current context: %w", err)
	}
	config, err = fleet.ParseKubeconfig(minified)
	return config, minified, err
}

// Server returns the address of the cluster that a kubeconfig is for, "" if it cannot be used.
func Server(kubeconfig []byte) string {
	config, _, err := parseKubeconfig(kubeconfig)
	if err != nil {
		return ""
	}
	return config.Host
}

// accountKubeconfig returns a kubeconfig for the cluster that config connects to, with the token of a ServiceAccount.
func accountKubeconfig(config *rest.Config, account client.ObjectKey, token string) ([]byte, error) {
	const context = "sveltos-context"
	cluster, err := addressIn(config)
	if err != nil {
		return nil, err
	}
	made := clientcmdapi.NewConfig()
	made.Clusters[localCluster] = cluster
	made.AuthInfos[account.Name] = &clientcmdapi.AuthInfo{Token: token}
	made.Contexts[context] = &clientcmdapi.Context{Cluster: localCluster, AuthInfo: account.Name, Namespace: account.Namespace}
	made.CurrentContext = context
	kubeconfig, err := clientcmd.Write(*made)
	if err != nil {
		return nil, fmt.Errorf("encode the kubeconfig: %w", err)
	}
	return kubeconfig, nil
}

// addressIn returns the address in config so that it holds for others too, without credentials.
func addressIn(config *rest.Config) (*clientcmdapi.Cluster, error) {
	if config.Insecure {
		return nil, errors.New("the context does not verify the cluster's certificate (insecure-skip-tls-verify), and its kubeconfig must")
	}
	cluster := &clientcmdapi.Cluster{
		Server: config.Host, TLSServerName: config.ServerName, CertificateAuthorityData: config.CAData, DisableCompression: config.DisableCompression,
	}
	if len(cluster.CertificateAuthorityData) == 0 && config.CAFile != "" {
		ca, err := os.ReadFile(config.CAFile)
		if err != nil {
			return nil, fmt.Errorf("read the cluster's certificate authority: %w", err)
		}
		cluster.CertificateAuthorityData = ca
	}
	// Only the proxy-url of a kubeconfig is in config; that of the environment is not.
	if config.Proxy != nil {
		server, err := url.Parse(config.Host)
		if err != nil {
			return nil, fmt.Errorf("read the cluster's address: %w", err)
		}
		proxy, err := config.Proxy(&http.Request{URL: server})
		if err != nil {
			return nil, fmt.Errorf("read the proxy of the cluster's context: %w", err)
		}
		if proxy != nil {
			cluster.ProxyURL = proxy.String()
		}
	}
	return cluster, nil
}

// awaitAccess waits until a kubeconfig that was just made works: the rights of a new identity take a moment to be
// known.
func awaitAccess(ctx context.Context, kubeconfig []byte) error {
	config, err := fleet.ParseKubeconfig(kubeconfig)
	if err != nil {
		return fmt.Errorf("try the new kubeconfig: %w", err)
	}
	var last error
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, accessTimeout, true, func(ctx context.Context) (bool, error) {
		last = checkAccess(ctx, config)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("try the new kubeconfig: %w", cmp.Or(ctx.Err(), last, err))
	}
	return nil
}

// checkAccess asks the member whether it knows the credentials and whether they suffice.
func checkAccess(ctx context.Context, member *rest.Config) error {
	ctx, cancel := context.WithTimeout(ctx, accessTimeout)
	defer cancel()
	config := rest.CopyConfig(member)
	config.Timeout = accessTimeout
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("it cannot be used: %w", err)
	}
	// The record of what is on the member lives in these Secrets: without them nothing can be deployed.
	review, err := clientset.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: "create", Resource: "secrets", Namespace: kube.AgentNamespace,
		}},
	}, metav1.CreateOptions{})
	switch {
	case apierrors.IsUnauthorized(err), apierrors.IsForbidden(err):
		return fmt.Errorf("the server %s does not accept its credentials: %w", member.Host, err)
	case err != nil:
		return fmt.Errorf("the server %s cannot be reached within %s: %w", member.Host, accessTimeout, err)
	case !review.Status.Allowed:
		return fmt.Errorf("it may not create Secrets in namespace %s of the cluster, where Towline keeps its record", kube.AgentNamespace)
	}
	return nil
}
