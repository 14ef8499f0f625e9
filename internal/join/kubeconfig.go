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

// reachLimit is how long a member may take to answer while it is being registered.
const reachLimit = 10 * time.Second

// selfContained reads a kubeconfig that the hub shall use: everything that its current context needs is in it, and it
// starts no programs.
func selfContained(kubeconfig []byte) (*rest.Config, error) {
	loaded, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("it is not a kubeconfig: %w", err)
	}
	context, ok := loaded.Contexts[loaded.CurrentContext]
	if !ok {
		return nil, fmt.Errorf("its current-context %q is not among its contexts", loaded.CurrentContext)
	}
	cluster, ok := loaded.Clusters[context.Cluster]
	if !ok || cluster.Server == "" {
		return nil, fmt.Errorf("its context %q has no cluster with a server", loaded.CurrentContext)
	}
	user, ok := loaded.AuthInfos[context.AuthInfo]
	if !ok {
		return nil, fmt.Errorf("its context %q has no user", loaded.CurrentContext)
	}
	if err := errors.Join(checkCluster(cluster), checkUser(context.AuthInfo, user)); err != nil {
		return nil, err
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("it cannot be used: %w", err)
	}
	return config, nil
}

// minified returns a kubeconfig with nothing in it but what its current context needs: the credentials of other
// clusters are nobody's business.
func minified(kubeconfig []byte) ([]byte, error) {
	loaded, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("it is not a kubeconfig: %w", err)
	}
	if err := clientcmdapi.MinifyConfig(loaded); err != nil {
		return nil, fmt.Errorf("take its current context: %w", err)
	}
	out, err := clientcmd.Write(*loaded)
	if err != nil {
		return nil, fmt.Errorf("encode its current context: %w", err)
	}
	return out, nil
}

// Server returns the address of the cluster that a kubeconfig leads to, "" if it cannot be used.
func Server(kubeconfig []byte) string {
	config, err := selfContained(kubeconfig)
	if err != nil {
		return ""
	}
	return config.Host
}

func checkCluster(cluster *clientcmdapi.Cluster) error {
	if cluster.InsecureSkipTLSVerify {
		return errors.New("it does not verify the server's certificate (insecure-skip-tls-verify)")
	}
	if err := fleet.ValidateProxyURL(cluster.ProxyURL); err != nil {
		return err
	}
	return noFile("certificate-authority", cluster.CertificateAuthority)
}

func checkUser(name string, user *clientcmdapi.AuthInfo) error {
	if user.Exec != nil {
		return fmt.Errorf("user %q runs the program %q for its credentials, which the hub does not have", name, user.Exec.Command)
	}
	if user.AuthProvider != nil {
		return fmt.Errorf("user %q takes its credentials from the auth provider %q, which the hub does not have", name, user.AuthProvider.Name)
	}
	return errors.Join(
		noFile("client-certificate", user.ClientCertificate),
		noFile("client-key", user.ClientKey),
		noFile("tokenFile", user.TokenFile),
	)
}

func noFile(field, path string) error {
	if path == "" {
		return nil
	}
	return fmt.Errorf("its %s is the file %q, which the hub does not have; put the content in with: kubectl config view --flatten --minify --raw", field, path)
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

// awaitReach waits until a kubeconfig that was just made works: the rights of a new identity take a moment to be known.
func awaitReach(ctx context.Context, kubeconfig []byte) error {
	config, err := selfContained(kubeconfig)
	if err != nil {
		return fmt.Errorf("try the new kubeconfig: %w", err)
	}
	var last error
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, reachLimit, true, func(ctx context.Context) (bool, error) {
		last = checkReach(ctx, config)
		return last == nil, nil
	})
	if err != nil {
		return fmt.Errorf("try the new kubeconfig: %w", cmp.Or(ctx.Err(), last, err))
	}
	return nil
}

// checkReach asks the member whether it knows the credentials and whether they suffice.
func checkReach(ctx context.Context, member *rest.Config) error {
	ctx, cancel := context.WithTimeout(ctx, reachLimit)
	defer cancel()
	config := rest.CopyConfig(member)
	config.Timeout = reachLimit
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
		return fmt.Errorf("the server %s cannot be reached within %s: %w", member.Host, reachLimit, err)
	case !review.Status.Allowed:
		return fmt.Errorf("it may not create Secrets in namespace %s of the cluster, where Towline keeps its record", kube.AgentNamespace)
	}
	return nil
}
