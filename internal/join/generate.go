package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// GenerateRequest is a request for a kubeconfig with a token of a ServiceAccount.
type GenerateRequest struct {
	// Namespace and ServiceAccount name the ServiceAccount. Default of both: projectsveltos.
	Namespace      string
	ServiceAccount string
	// Create creates or repairs the namespace, the ServiceAccount, and its RBAC with all permissions.
	Create bool
	// ExpirationSeconds is the requested life of the token, at least 600. With 0, the cluster decides it.
	ExpirationSeconds int64
	// ServiceAccountToken requests a token that does not expire, in a Secret with the name of the account.
	ServiceAccountToken bool
}

// Validate returns an error for invalid fields, without a connection. The error names the command-line flag.
func (r GenerateRequest) Validate() error {
	shortest := int64(minTokenLife / time.Second)
	switch {
	case r.Namespace != "" && len(validation.IsDNS1123Label(r.Namespace)) > 0:
		return fmt.Errorf("--namespace: %q is not a DNS label", r.Namespace)
	case r.ServiceAccount != "" && len(validation.IsDNS1123Subdomain(r.ServiceAccount)) > 0:
		return fmt.Errorf("--serviceaccount: %q is not a name of a ServiceAccount", r.ServiceAccount)
	case r.ExpirationSeconds != 0 && r.ExpirationSeconds < shortest:
		return fmt.Errorf("--expirationSeconds: %d is less than %d, the shortest life that Kubernetes gives", r.ExpirationSeconds, shortest)
	case r.ExpirationSeconds != 0 && r.ServiceAccountToken:
		return errors.New("--expirationSeconds: a token of --service-account-token does not expire")
	}
	return nil
}

// GenerateKubeconfig returns a kubeconfig with a token of a ServiceAccount of the cluster. If it fails, or ctx ends, it
// rolls back its writes. Otherwise the objects stay, even after the deregistration of clusters that use the account.
func GenerateKubeconfig(ctx context.Context, cluster *rest.Config, r GenerateRequest) ([]byte, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	if _, err := clusterEntry(cluster); err != nil {
		return nil, err
	}
	account := client.ObjectKey{Namespace: cmp.Or(r.Namespace, kube.AgentNamespace), Name: cmp.Or(r.ServiceAccount, memberIdentityName)}
	i, err := newMemberIdentity(cluster, account)
	if err != nil {
		return nil, err
	}
	i.setUser("generated-"+shortHash(account.String()), "a generated kubeconfig of "+account.String())
	kubeconfig, err := i.generate(ctx, cluster, r)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("generate a kubeconfig: %w", err), i.writer.RollBack(ctx))
	}
	return kubeconfig, nil
}

func (i *memberIdentity) generate(ctx context.Context, cluster *rest.Config, r GenerateRequest) ([]byte, error) {
	if r.Create {
		if err := i.ensure(ctx); err != nil {
			return nil, err
		}
	} else if found, err := read(ctx, i.member, &corev1.ServiceAccount{}, i.account); err != nil || !found {
		return nil, cmp.Or(err, fmt.Errorf("ServiceAccount %s does not exist; --create makes it", i.account))
	}
	secret := ""
	if r.ServiceAccountToken {
		secret = i.account.Name
	}
	return i.kubeconfig(ctx, cluster, secret, time.Duration(r.ExpirationSeconds)*time.Second)
}
