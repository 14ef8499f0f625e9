package bootstrap

import (
	"context"
	"fmt"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	tokenapi "k8s.io/cluster-bootstrap/token/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// Names of objects, users and resources on the hub, the same as in Karmada.
const (
	clusterInfoReader   = "system:karmada:bootstrap-signer-clusterinfo"
	csrCreatorRole      = "system:karmada:agent-bootstrap"
	registrationRole    = "system:karmada:certificatesigningrequest:autoapprover"
	renewalRole         = "system:karmada:certificatesigningrequest:selfautoapprover"
	registrationBinding = "system:karmada:agent-autoapprove-bootstrap"
	renewalBinding      = "system:karmada:agent-autoapprove-certificate-rotation"
	anonymousUser       = "system:anonymous"
	csrResource         = "certificatesigningrequests"
)

// Subresources of CertificateSigningRequests that exist only in RBAC rules: a user who may create one gets the
// requested certificate.
const (
	// RegistrationSubresource is for the first certificate of a cluster.
	RegistrationSubresource = "clusteragent"
	// RenewalSubresource is for an agent's next certificate.
	RenewalSubresource = "selfclusteragent"
)

// EnsureHubObjects creates the hub's objects for clusters that register with a token: cluster-info if it does not exist
// and address is complete, the namespace for the reservations of cluster IDs, the RBAC to request certificates, and the
// policy of EnsureAgentPolicy. If it returns kube.ErrNoAdmissionPolicies, all other objects are created. It can be
// repeated.
func EnsureHubObjects(ctx context.Context, hub *rest.Config, address join.HubAddress) error {
	hubClient, err := client.New(hub, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	if err := ensureClusterInfo(ctx, hubClient, address); err != nil {
		return err
	}
	reservations := &corev1.Namespace{ObjectMeta: objectMeta("", fleet.DefaultClusterNamespace)}
	for _, obj := range append([]client.Object{reservations}, bootstrapRBAC()...) {
		if err := ensureObject(ctx, hubClient, obj); err != nil {
			return err
		}
	}
	_, err = EnsureAgentPolicy(ctx, hubClient)
	return err
}

// ensureClusterInfo creates ConfigMap kube-public/cluster-info, unless it exists: some platforms create it.
func ensureClusterInfo(ctx context.Context, hub client.Client, address join.HubAddress) error {
	if address.Server == "" || len(address.CA) == 0 {
		return nil
	}
	config := clientcmdapi.NewConfig()
	config.Clusters[""] = &clientcmdapi.Cluster{Server: address.Server, TLSServerName: address.ServerName, CertificateAuthorityData: address.CA}
	kubeconfig, err := clientcmd.Write(*config)
	if err != nil {
		return fmt.Errorf("encode the hub's address: %w", err)
	}
	info := &corev1.ConfigMap{ObjectMeta: objectMeta(metav1.NamespacePublic, tokenapi.ConfigMapClusterInfo), Data: map[string]string{tokenapi.KubeConfigKey: string(kubeconfig)}}
	// Read it first: the hub may have no permission to create it.
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

// bootstrapRBAC returns the RBAC objects to read the hub's address anonymously, and to request certificates.
func bootstrapRBAC() []client.Object {
	create := func(resource string) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{{APIGroups: []string{certificatesv1.GroupName}, Resources: []string{resource}, Verbs: []string{"create"}}}
	}
	group := func(name string) []rbacv1.Subject {
		return []rbacv1.Subject{{Kind: rbacv1.GroupKind, APIGroup: rbacv1.GroupName, Name: name}}
	}
	return []client.Object{
		&rbacv1.Role{ObjectMeta: objectMeta(metav1.NamespacePublic, clusterInfoReader), Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{tokenapi.ConfigMapClusterInfo}, Verbs: []string{"get"}},
		}},
		&rbacv1.RoleBinding{ObjectMeta: objectMeta(metav1.NamespacePublic, clusterInfoReader), RoleRef: roleRef("Role", clusterInfoReader), Subjects: []rbacv1.Subject{
			{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: anonymousUser},
		}},
		&rbacv1.ClusterRole{ObjectMeta: objectMeta("", csrCreatorRole), Rules: create(csrResource)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: objectMeta("", csrCreatorRole), RoleRef: roleRef("ClusterRole", csrCreatorRole), Subjects: group(DefaultTokenGroup)},
		&rbacv1.ClusterRole{ObjectMeta: objectMeta("", registrationRole), Rules: create(csrResource + "/" + RegistrationSubresource)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: objectMeta("", registrationBinding), RoleRef: roleRef("ClusterRole", registrationRole), Subjects: group(DefaultTokenGroup)},
		&rbacv1.ClusterRole{ObjectMeta: objectMeta("", renewalRole), Rules: create(csrResource + "/" + RenewalSubresource)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: objectMeta("", renewalBinding), RoleRef: roleRef("ClusterRole", renewalRole), Subjects: group(AgentsGroup)},
	}
}

// Names that are the same as in Karmada.
const (
	// AgentsGroup is the group of all agents. It is the only organization in their certificates.
	AgentsGroup = "system:karmada:agents"
	// AgentUserPrefix is the prefix of an agent's user, which is the common name of its certificate. The Cluster's name
	// follows.
	AgentUserPrefix = "system:karmada:agent:"
	// DefaultTokenGroup is the group of bootstrap tokens for registrations.
	DefaultTokenGroup = "system:bootstrappers:karmada:default-cluster-token"
	// TokenUserPrefix is the prefix of the user of a token's holder. The id of the token follows.
	TokenUserPrefix = tokenapi.BootstrapUserPrefix
	// Signer is the signer of the certificates of agents.
	Signer = certificatesv1.KubeAPIServerClientSignerName
)

// clusterGroupPrefix is the prefix of the group of tokens that are bound to a Cluster. The Cluster's name follows.
const clusterGroupPrefix = "system:bootstrappers:karmada:cluster:"

// AgentUser returns the user name of a Cluster's agent on the hub.
func AgentUser(cluster string) string { return AgentUserPrefix + cluster }

// BoundCluster returns the Cluster to which a token with these groups is bound. ok is false for a token that is not
// bound. For a token with the groups of several Clusters, which is for none of them, cluster is "" and ok is true.
func BoundCluster(groups []string) (cluster string, ok bool) {
	for _, group := range groups {
		name, found := strings.CutPrefix(group, clusterGroupPrefix)
		if !found {
			continue
		}
		if ok && name != cluster {
			return "", true
		}
		cluster, ok = name, true
	}
	return cluster, ok
}
