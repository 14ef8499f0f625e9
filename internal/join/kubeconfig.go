package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/towline/towline/internal/kube"
)

// reachLimit is how long a member may take to answer while it is being registered.
const reachLimit = 10 * time.Second

// selfContained reads a kubeconfig that the hub shall use: everything that its current context needs is in it, and it starts no programs.
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

func checkCluster(cluster *clientcmdapi.Cluster) error {
	if cluster.InsecureSkipTLSVerify {
		return errors.New("it does not verify the server's certificate (insecure-skip-tls-verify)")
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
