package bootstrap

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

// leaseSeconds is the duration of the agent's Lease, as in Karmada.
const leaseSeconds = 40

// EnsureAgentRBAC creates or corrects the execution namespace, the Lease and the RBAC of a Cluster's agent on the hub.
// Their labels name the Cluster as the owner. It returns an error while the execution namespace of an earlier Cluster
// with the same name is being deleted. If the Cluster was deleted meanwhile, it deletes the RBAC again. hub must read
// from the API server.
func EnsureAgentRBAC(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster) error {
	namespace := fleet.ExecutionSpace(cluster.Name)
	if _, err := karmada.EnsureExecutionNamespace(ctx, hub, cluster); err != nil {
		return err
	}
	sharedRole, err := join.EnsureSharedRole(ctx, hub)
	if err != nil {
		return err
	}
	name, user := karmada.AgentRoleName(cluster.Name), rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: AgentUser(cluster.Name)}
	for _, obj := range []client.Object{
		&coordinationv1.Lease{ObjectMeta: objectMeta(namespace, cluster.Name), Spec: coordinationv1.LeaseSpec{LeaseDurationSeconds: ptr.To[int32](leaseSeconds)}},
		&rbacv1.ClusterRole{ObjectMeta: objectMeta("", name), Rules: clusterScopedRules(cluster.Name)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: objectMeta("", name), RoleRef: roleRef("ClusterRole", name), Subjects: []rbacv1.Subject{user}},
		&rbacv1.Role{ObjectMeta: objectMeta(namespace, name), Rules: executionNamespaceRules(cluster.Name)},
		&rbacv1.RoleBinding{ObjectMeta: objectMeta(namespace, name), RoleRef: roleRef("Role", name), Subjects: []rbacv1.Subject{user}},
		&rbacv1.RoleBinding{ObjectMeta: objectMeta(kube.AgentNamespace, name), RoleRef: roleRef("Role", sharedRole), Subjects: []rbacv1.Subject{user}},
	} {
		karmada.SetOwnerLabels(obj, cluster.Name)
		if err := ensureObject(ctx, hub, obj); err != nil {
			return err
		}
	}
	live := &clusterv1alpha1.Cluster{}
	if err := hub.Get(ctx, client.ObjectKeyFromObject(cluster), live); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read Cluster %s: %w", cluster.Name, err)
	}
	if live.UID != cluster.UID {
		return errors.Join(fmt.Errorf("the Cluster %s is gone", cluster.Name), karmada.DeleteLeftoverRBAC(ctx, hub, cluster.Name))
	}
	return nil
}

const (
	// maxReadableCSRs limits the requests that one requester can read, and the RBAC objects for them.
	maxReadableCSRs = 20
	// requesterLabel on these RBAC objects is a hash of the requester's name, with requesterHashLength characters: a label
	// has at most 63.
	requesterLabel      = "towline.dev/requester"
	requesterHashLength = 40
)

// EnsureCSRReadRBAC permits the requester to read csr. The garbage collector deletes the RBAC objects with csr. A
// requester can read only its last maxReadableCSRs requests. hub must read from the API server.
func EnsureCSRReadRBAC(ctx context.Context, hub client.Client, csr *certificatesv1.CertificateSigningRequest) error {
	// With the uid, a later request with the same name has another role.
	name := "system:karmada:csr:" + string(csr.UID)
	sum := sha256.Sum256([]byte(csr.Spec.Username))
	requesterLabels := client.MatchingLabels{requesterLabel: hex.EncodeToString(sum[:])[:requesterHashLength]}
	earlier := &rbacv1.ClusterRoleList{}
	if err := hub.List(ctx, earlier, requesterLabels); err != nil {
		return fmt.Errorf("list the requests that the requester may read: %w", err)
	}
	slices.SortFunc(earlier.Items, func(a, b rbacv1.ClusterRole) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	for _, role := range earlier.Items[:max(0, len(earlier.Items)-maxReadableCSRs+1)] {
		for _, obj := range []client.Object{&rbacv1.ClusterRoleBinding{ObjectMeta: objectMeta("", role.Name)}, &rbacv1.ClusterRole{ObjectMeta: objectMeta("", role.Name)}} {
			if err := hub.Delete(ctx, obj); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("delete %s, which gives access to an earlier request: %w", role.Name, err)
			}
		}
	}
	owner := metav1.OwnerReference{
		APIVersion: certificatesv1.SchemeGroupVersion.String(), Kind: "CertificateSigningRequest", Name: csr.Name, UID: csr.UID,
	}
	for _, obj := range []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: objectMeta("", name), Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{certificatesv1.GroupName}, Resources: []string{"certificatesigningrequests"}, ResourceNames: []string{csr.Name}, Verbs: []string{"get"},
		}}},
		&rbacv1.ClusterRoleBinding{ObjectMeta: objectMeta("", name), RoleRef: roleRef("ClusterRole", name), Subjects: []rbacv1.Subject{
			{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: csr.Spec.Username},
		}},
	} {
		obj.SetOwnerReferences([]metav1.OwnerReference{owner})
		obj.SetLabels(requesterLabels)
		if err := ensureObject(ctx, hub, obj); err != nil {
			return err
		}
	}
	return nil
}

// clusterScopedRules are the rules for the Cluster, and for the request of the next certificate.
func clusterScopedRules(cluster string) []rbacv1.PolicyRule {
	self := []string{cluster}
	return []rbacv1.PolicyRule{
		{APIGroups: []string{clusterv1alpha1.GroupVersion.Group}, Resources: []string{"clusters"}, ResourceNames: self, Verbs: []string{"get", "list", "watch", "patch", "delete"}},
		{APIGroups: []string{clusterv1alpha1.GroupVersion.Group}, Resources: []string{"clusters/status"}, ResourceNames: self, Verbs: []string{"get", "patch"}},
		{APIGroups: []string{certificatesv1.GroupName}, Resources: []string{"certificatesigningrequests"}, Verbs: []string{"create"}},
	}
}

// executionNamespaceRules are the rules for the execution namespace, which has no objects of other clusters.
func executionNamespaceRules(cluster string) []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{APIGroups: []string{workv1alpha1.GroupVersion.Group}, Resources: []string{"works"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{APIGroups: []string{workv1alpha1.GroupVersion.Group}, Resources: []string{"works/status"}, Verbs: []string{"get", "patch"}},
		{APIGroups: []string{coordinationv1.GroupName}, Resources: []string{"leases"}, ResourceNames: []string{cluster}, Verbs: []string{"get", "update", "patch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups/status"}, Verbs: []string{"get", "patch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationbundles"}, Verbs: []string{"get"}},
		{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{fleet.ContentKeySecret(cluster)}, Verbs: []string{"get"}},
	}
}

func roleRef(kind, name string) rbacv1.RoleRef {
	return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: name}
}

func objectMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}

// ensureObject creates obj on the hub or corrects it, with clusterv1alpha1.SystemLabel. If an existing binding has
// another roleRef, which is immutable, it creates the binding again.
func ensureObject(ctx context.Context, hub client.Client, obj client.Object) error {
	labels := map[string]string{clusterv1alpha1.SystemLabel: "true"}
	maps.Copy(labels, obj.GetLabels())
	obj.SetLabels(labels)
	writer := rollback.New(hub, "")
	_, _, err := writer.Apply(ctx, obj, nil)
	switch obj.(type) {
	case *rbacv1.ClusterRoleBinding, *rbacv1.RoleBinding:
		if !apierrors.IsInvalid(err) {
			return err
		}
		if err := hub.Delete(ctx, obj); client.IgnoreNotFound(err) != nil {
			return err
		}
		_, _, err = writer.Apply(ctx, obj, nil)
	}
	return err
}
