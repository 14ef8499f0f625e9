package bootstrap

import (
	"context"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// Names of objects on the hub, the same as in Karmada.
const (
	infoName        = "cluster-info"
	infoReader      = "system:karmada:bootstrap-signer-clusterinfo"
	requesters      = "system:karmada:agent-bootstrap"
	approveFirst    = "system:karmada:certificatesigningrequest:autoapprover"
	approveNext     = "system:karmada:certificatesigningrequest:selfautoapprover"
	approvedFirst   = "system:karmada:agent-autoapprove-bootstrap"
	approvedNext    = "system:karmada:agent-autoapprove-certificate-rotation"
	anonymous       = "system:anonymous"
	requestResource = "certificatesigningrequests"
)

// Subresources of CertificateSigningRequests that do not exist: a user who may create one may have such a certificate.
const (
	// RegistrationRequest is for the first certificate of a cluster.
	RegistrationRequest = "clusteragent"
	// RenewalRequest is for an agent's next certificate.
	RenewalRequest = "selfclusteragent"
)

// Prepare makes the hub ready for clusters that register with a token. It creates cluster-info if it does not exist and
// address has a server and a certificate authority, the namespace for the reservations of cluster ids, the permissions
// to request certificates, and the admission policy for agents (see EnsurePolicy). It can be repeated. After
// ErrNoPolicies everything else is done.
func Prepare(ctx context.Context, hub *rest.Config, address join.HubAddress) error {
	hubClient, err := client.New(hub, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	if err := publish(ctx, hubClient, address); err != nil {
		return err
	}
	claims := &corev1.Namespace{ObjectMeta: named("", fleet.DefaultClusterNamespace)}
	for _, obj := range append([]client.Object{claims}, permissions()...) {
		if err := ensure(ctx, hubClient, obj); err != nil {
			return err
		}
	}
	return EnsurePolicy(ctx, hubClient)
}

// publish creates kube-public/cluster-info unless the platform has one.
func publish(ctx context.Context, hub client.Client, address join.HubAddress) error {
	if address.Server == "" || len(address.CA) == 0 {
		return nil
	}
	config := clientcmdapi.NewConfig()
	config.Clusters[""] = &clientcmdapi.Cluster{Server: address.Server, TLSServerName: address.ServerName, CertificateAuthorityData: address.CA}
	kubeconfig, err := clientcmd.Write(*config)
	if err != nil {
		return fmt.Errorf("encode the hub's address: %w", err)
	}
	info := &corev1.ConfigMap{ObjectMeta: named(metav1.NamespacePublic, infoName), Data: map[string]string{infoKey: string(kubeconfig)}}
	// It is read first, since the hub may have no permission to create it.
	if err := hub.Get(ctx, client.ObjectKeyFromObject(info), &corev1.ConfigMap{}); !apierrors.IsNotFound(err) {
		if err != nil {
			return fmt.Errorf("read ConfigMap %s: %w", client.ObjectKeyFromObject(info), err)
		}
		return nil
	}
	if err := hub.Create(ctx, info, client.FieldOwner(kube.FieldManager)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create ConfigMap %s: %w", client.ObjectKeyFromObject(info), err)
	}
	return nil
}

// permissions are the permissions to read the hub's address, and to request certificates.
func permissions() []client.Object {
	create := func(resource string) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{{APIGroups: []string{certificatesv1.GroupName}, Resources: []string{resource}, Verbs: []string{"create"}}}
	}
	group := func(name string) []rbacv1.Subject {
		return []rbacv1.Subject{{Kind: rbacv1.GroupKind, APIGroup: rbacv1.GroupName, Name: name}}
	}
	return []client.Object{
		&rbacv1.Role{ObjectMeta: named(metav1.NamespacePublic, infoReader), Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{infoName}, Verbs: []string{"get"}},
		}},
		&rbacv1.RoleBinding{ObjectMeta: named(metav1.NamespacePublic, infoReader), RoleRef: roleRef("Role", infoReader), Subjects: []rbacv1.Subject{
			{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: anonymous},
		}},
		&rbacv1.ClusterRole{ObjectMeta: named("", requesters), Rules: create(requestResource)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named("", requesters), RoleRef: roleRef("ClusterRole", requesters), Subjects: group(DefaultGroup)},
		&rbacv1.ClusterRole{ObjectMeta: named("", approveFirst), Rules: create(requestResource + "/" + RegistrationRequest)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named("", approvedFirst), RoleRef: roleRef("ClusterRole", approveFirst), Subjects: group(DefaultGroup)},
		&rbacv1.ClusterRole{ObjectMeta: named("", approveNext), Rules: create(requestResource + "/" + RenewalRequest)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named("", approvedNext), RoleRef: roleRef("ClusterRole", approveNext), Subjects: group(AgentsGroup)},
	}
}
