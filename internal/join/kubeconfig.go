package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// accessTimeout is the timeout of requests to a member during a registration or a renewal of its token.
const accessTimeout = 10 * time.Second

// parseKubeconfig returns the current context of a kubeconfig: as a configuration, and as a kubeconfig without the
// other contexts. It returns an error if the context refers to files or programs.
func parseKubeconfig(kubeconfig []byte) (config *rest.Config, minified []byte, err error) {
	loaded, err := fleet.LoadKubeconfig(kubeconfig)
	if err != nil {
		return nil, nil, err
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

// KubeconfigServer returns the server of the current context, or "" for an invalid kubeconfig.
func KubeconfigServer(kubeconfig []byte) string {
	config, _, err := parseKubeconfig(kubeconfig)
	if err != nil {
		return ""
	}
	return config.Host
}

// tokenKubeconfig returns a kubeconfig with one context and a token.
func tokenKubeconfig(cluster *clientcmdapi.Cluster, user, token, namespace string) *clientcmdapi.Config {
	const name, context = "local", "sveltos-context"
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = cluster
	config.AuthInfos[user] = &clientcmdapi.AuthInfo{Token: token}
	config.Contexts[context] = &clientcmdapi.Context{Cluster: name, AuthInfo: user, Namespace: namespace}
	config.CurrentContext = context
	return config
}

// clusterEntry returns the cluster entry for config, with file contents inlined, so that it can be used on another
// machine. It returns an error if config does not verify the cluster's certificate.
func clusterEntry(config *rest.Config) (*clientcmdapi.Cluster, error) {
	if config.Insecure {
		return nil, errors.New("the context does not verify the cluster's certificate (insecure-skip-tls-verify), and its kubeconfig must")
	}
	address, err := configuredAddress(config)
	if err != nil {
		return nil, err
	}
	if address.ProxyURL, err = ProxyOf(config); err != nil {
		return nil, err
	}
	cluster := address.clusterEntry()
	cluster.DisableCompression = config.DisableCompression
	return cluster, nil
}

// ProxyOf returns the URL of the proxy in config, or "". It ignores a proxy in the environment variables.
func ProxyOf(config *rest.Config) (string, error) {
	if config.Proxy == nil {
		return "", nil
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return "", fmt.Errorf("read the cluster's address: %w", err)
	}
	proxy, err := config.Proxy(&http.Request{URL: server})
	if err != nil {
		return "", fmt.Errorf("read the proxy of the cluster's kubeconfig: %w", err)
	}
	if proxy == nil {
		return "", nil
	}
	return proxy.String(), nil
}

// awaitAccess calls checkAccess until it succeeds, at most for accessTimeout: the permissions of a new account take
// effect with a delay.
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

// checkAccess returns an error if the member rejects the credentials, does not respond within accessTimeout, or does
// not allow them to create Secrets in kube.AgentNamespace.
func checkAccess(ctx context.Context, member *rest.Config) error {
	ctx, cancel := context.WithTimeout(ctx, accessTimeout)
	defer cancel()
	config := rest.CopyConfig(member)
	config.Timeout = accessTimeout
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("it cannot be used: %w", err)
	}
	// The hub stores the inventory of a member in these Secrets, and deploys nothing without it.
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
