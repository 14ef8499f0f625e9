package bootstrap

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

// leaseSeconds is the time for which an agent counts as alive after its last heartbeat, as in Karmada.
const leaseSeconds = 40

// EnsureAgentRBAC creates or corrects the execution namespace, the Lease and the permissions of a Cluster's agent on
// the hub. The Cluster is the owner of all of them. hub must read from the API server. It returns an error while the
// execution namespace of an earlier Cluster with the same name is being deleted.
func EnsureAgentRBAC(ctx context.Context, hub client.Client, c *clusterv1alpha1.Cluster) error {
	namespace := fleet.ExecutionSpace(c.Name)
	created, err := createExecutionNamespace(ctx, hub, c)
	if err != nil {
		return err
	}
	if err := ensureLease(ctx, hub, c); err != nil {
		return err
	}
	sharedRole, err := join.EnsureSharedRole(ctx, hub)
	if err != nil {
		return err
	}
	name, user := karmada.AgentRoleName(c.Name), rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: AgentUser(c.Name)}
	for _, obj := range []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: named("", name), Rules: clusterScopedRules(c.Name)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named("", name), RoleRef: roleRef("ClusterRole", name), Subjects: []rbacv1.Subject{user}},
		&rbacv1.Role{ObjectMeta: named(namespace, name), Rules: executionNamespaceRules(c.Name)},
		&rbacv1.RoleBinding{ObjectMeta: named(namespace, name), RoleRef: roleRef("Role", name), Subjects: []rbacv1.Subject{user}},
		&rbacv1.RoleBinding{ObjectMeta: named(kube.AgentNamespace, name), RoleRef: roleRef("Role", sharedRole), Subjects: []rbacv1.Subject{user}},
	} {
		karmada.SetOwnerLabels(obj, c)
		if err := ensureObject(ctx, hub, obj); err != nil {
			return err
		}
	}
	return cleanUpIfClusterDeleted(ctx, hub, c, created)
}

// cleanUpIfClusterDeleted deletes the created objects if the Cluster was deleted while they were created. created is
// the execution namespace, nil if it existed before.
func cleanUpIfClusterDeleted(ctx context.Context, hub client.Client, c *clusterv1alpha1.Cluster, created *corev1.Namespace) error {
	live := &clusterv1alpha1.Cluster{}
	err := hub.Get(ctx, client.ObjectKeyFromObject(c), live)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read Cluster %s: %w", c.Name, err)
	}
	if err == nil && live.UID == c.UID {
		return nil
	}
	errs := []error{fmt.Errorf("the Cluster %s is gone", c.Name), karmada.DeleteAgentRBAC(ctx, hub, c)}
	if created != nil {
		// If a later Cluster has adopted it, this is a conflict.
		exact := client.Preconditions{UID: &created.UID, ResourceVersion: &created.ResourceVersion}
		errs = append(errs, client.IgnoreNotFound(hub.Delete(ctx, created, exact)))
	}
	return errors.Join(errs...)
}

const (
	// maxReadableCSRs limits the requests that one requester can read at a time.
	maxReadableCSRs = 20
	// requesterLabel on the RBAC objects for a request is a hash of the requester's name. It has requesterHashLength
	// characters, since a label has at most 63.
	requesterLabel      = "towline.dev/requester"
	requesterHashLength = 40
)

// EnsureCSRReadRBAC permits the requester to read csr until csr is deleted. Only the last maxReadableCSRs requests of a
// requester are readable. hub must read from the API server.
func EnsureCSRReadRBAC(ctx context.Context, hub client.Client, csr *certificatesv1.CertificateSigningRequest) error {
	// With the uid, a later request with the same name has another role.
	name := "system:karmada:csr:" + string(csr.UID)
	sum := sha256.Sum256([]byte(csr.Spec.Username))
	requester := client.MatchingLabels{requesterLabel: hex.EncodeToString(sum[:])[:requesterHashLength]}
	owner := metav1.OwnerReference{
		APIVersion: certificatesv1.SchemeGroupVersion.String(), Kind: "CertificateSigningRequest", Name: csr.Name, UID: csr.UID,
	}
	for _, obj := range []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: named("", name), Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{certificatesv1.GroupName}, Resources: []string{"certificatesigningrequests"}, ResourceNames: []string{csr.Name}, Verbs: []string{"get"},
		}}},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named("", name), RoleRef: roleRef("ClusterRole", name), Subjects: []rbacv1.Subject{
			{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: csr.Spec.Username},
		}},
	} {
		obj.SetOwnerReferences([]metav1.OwnerReference{owner})
		obj.SetLabels(requester)
		if err := ensureObject(ctx, hub, obj); err != nil {
			return err
		}
	}
	return errors.Join(
		pruneCSRReadRBAC(ctx, hub, &rbacv1.ClusterRoleBindingList{}, requester, name),
		pruneCSRReadRBAC(ctx, hub, &rbacv1.ClusterRoleList{}, requester, name))
}

// pruneCSRReadRBAC deletes the oldest objects of a requester beyond maxReadableCSRs, but never the one with the name
// latest.
func pruneCSRReadRBAC(ctx context.Context, hub client.Client, list client.ObjectList, requester client.MatchingLabels, latest string) error {
	if err := hub.List(ctx, list, requester); err != nil {
		return fmt.Errorf("list the requests that the requester may read: %w", err)
	}
	var earlier []client.Object
	err := meta.EachListItem(list, func(item runtime.Object) error {
		if obj, ok := item.(client.Object); ok && obj.GetName() != latest {
			earlier = append(earlier, obj)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list the requests that the requester may read: %w", err)
	}
	slices.SortFunc(earlier, func(a, b client.Object) int {
		return cmp.Or(b.GetCreationTimestamp().Compare(a.GetCreationTimestamp().Time), strings.Compare(a.GetName(), b.GetName()))
	})
	for _, obj := range earlier[min(len(earlier), maxReadableCSRs-1):] {
		if err := hub.Delete(ctx, obj); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete %s, which gives access to an earlier request: %w", obj.GetName(), err)
		}
	}
	return nil
}

// clusterScopedRules are for the Cluster, and for the next certificate.
func clusterScopedRules(cluster string) []rbacv1.PolicyRule {
	self := []string{cluster}
	return []rbacv1.PolicyRule{
		{APIGroups: []string{clusterv1alpha1.GroupVersion.Group}, Resources: []string{"clusters"}, ResourceNames: self, Verbs: []string{"get", "list", "watch", "patch", "delete"}},
		{APIGroups: []string{clusterv1alpha1.GroupVersion.Group}, Resources: []string{"clusters/status"}, ResourceNames: self, Verbs: []string{"get", "patch"}},
		{APIGroups: []string{certificatesv1.GroupName}, Resources: []string{"certificatesigningrequests"}, Verbs: []string{"create"}},
	}
}

// executionNamespaceRules are for the execution namespace, which has no objects of other clusters.
func executionNamespaceRules(cluster string) []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{APIGroups: []string{workv1alpha1.GroupVersion.Group}, Resources: []string{"works"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{APIGroups: []string{workv1alpha1.GroupVersion.Group}, Resources: []string{"works/status"}, Verbs: []string{"get", "patch"}},
		{APIGroups: []string{coordinationv1.GroupName}, Resources: []string{"leases"}, ResourceNames: []string{cluster}, Verbs: []string{"get", "update", "patch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups/status"}, Verbs: []string{"get", "patch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationbundles"}, Verbs: []string{"get"}},
	}
}

// createExecutionNamespace creates the execution namespace and returns it, or nil if it exists. Package hub/spaces
// corrects later changes of its metadata.
func createExecutionNamespace(ctx context.Context, hub client.Client, c *clusterv1alpha1.Cluster) (*corev1.Namespace, error) {
	namespace := karmada.NewExecutionNamespace(c)
	err := hub.Create(ctx, namespace, client.FieldOwner(kube.FieldManager))
	switch {
	case apierrors.IsAlreadyExists(err):
		return nil, nil //nolint:nilnil // nil is the documented result for an existing namespace
	case err != nil:
		return nil, fmt.Errorf("create namespace %s: %w", namespace.Name, err)
	}
	return namespace, nil
}

// ensureLease creates the Lease of the agent. It replaces the Lease of an earlier Cluster with the same name, which has
// the heartbeat of another agent.
func ensureLease(ctx context.Context, hub client.Client, c *clusterv1alpha1.Cluster) error {
	lease := &coordinationv1.Lease{ObjectMeta: named(fleet.ExecutionSpace(c.Name), c.Name)}
	err := hub.Get(ctx, client.ObjectKeyFromObject(lease), lease)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read Lease %s: %w", client.ObjectKeyFromObject(lease), err)
	}
	if err == nil {
		if karmada.OwnerUID(lease) == c.UID {
			return nil
		}
		uid := lease.UID
		if err := hub.Delete(ctx, lease, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete Lease %s: %w", client.ObjectKeyFromObject(lease), err)
		}
	}
	desired := &coordinationv1.Lease{ObjectMeta: named(lease.Namespace, lease.Name), Spec: coordinationv1.LeaseSpec{LeaseDurationSeconds: ptr.To[int32](leaseSeconds)}}
	karmada.SetOwnerLabels(desired, c)
	// A concurrent call for the same Cluster may have created it.
	if err := hub.Create(ctx, desired, client.FieldOwner(kube.FieldManager)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create Lease %s: %w", client.ObjectKeyFromObject(desired), err)
	}
	return nil
}

func roleRef(kind, name string) rbacv1.RoleRef {
	return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: name}
}

func systemLabels() map[string]string {
	return map[string]string{clusterv1alpha1.SystemLabel: "true"}
}

func named(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}
