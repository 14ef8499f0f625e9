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

// leaseSeconds is how long an agent counts as alive after its last heartbeat: that of the Karmada surface.
const leaseSeconds = 40

// RoleName returns the name of the roles and bindings of a Cluster's agent on the hub.
func RoleName(cluster string) string { return karmada.AgentRole(cluster) }

// Grant makes or repairs what the agent of a Cluster needs on the hub: its execution space, its Lease and its rights,
// which all go with the Cluster. hub must read from the API server. It fails while the execution space of an earlier
// Cluster of that name is still going.
func Grant(ctx context.Context, hub client.Client, c *clusterv1alpha1.Cluster) error {
	space := fleet.ExecutionSpace(c.Name)
	made, err := ensureSpace(ctx, hub, c)
	if err != nil {
		return err
	}
	if err := ensureLease(ctx, hub, c); err != nil {
		return err
	}
	shared, err := join.MakeSharedRole(ctx, hub)
	if err != nil {
		return err
	}
	name, user := RoleName(c.Name), rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: AgentUser(c.Name)}
	for _, obj := range []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: named("", name), Rules: ownRules(c.Name)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named("", name), RoleRef: roleRef("ClusterRole", name), Subjects: []rbacv1.Subject{user}},
		&rbacv1.Role{ObjectMeta: named(space, name), Rules: spaceRules(c.Name)},
		&rbacv1.RoleBinding{ObjectMeta: named(space, name), RoleRef: roleRef("Role", name), Subjects: []rbacv1.Subject{user}},
		&rbacv1.RoleBinding{ObjectMeta: named(kube.AgentNamespace, name), RoleRef: roleRef("Role", shared), Subjects: []rbacv1.Subject{user}},
	} {
		karmada.Mark(obj, c)
		if err := ensure(ctx, hub, obj); err != nil {
			return err
		}
	}
	return stillThere(ctx, hub, c, made)
}

// stillThere takes everything back that was made for a Cluster which went meanwhile, and nothing else: whoever removed
// it may have looked before it was there. made is the execution space, nil if it was there before.
func stillThere(ctx context.Context, hub client.Client, c *clusterv1alpha1.Cluster, made *corev1.Namespace) error {
	live := &clusterv1alpha1.Cluster{}
	err := hub.Get(ctx, client.ObjectKeyFromObject(c), live)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read Cluster %s: %w", c.Name, err)
	}
	if err == nil && live.UID == c.UID {
		return nil
	}
	errs := []error{fmt.Errorf("the Cluster %s is gone", c.Name), karmada.RemoveRights(ctx, hub, c)}
	if made != nil {
		// One that a later Cluster has adopted makes this a conflict.
		exact := client.Preconditions{UID: &made.UID, ResourceVersion: &made.ResourceVersion}
		errs = append(errs, client.IgnoreNotFound(hub.Delete(ctx, made, exact)))
	}
	return errors.Join(errs...)
}

const (
	// readable is how many answers one requester can read at a time, whatever number of requests he makes.
	readable = 20
	// requesterLabel on what lets somebody read a request is a hash of his name.
	requesterLabel = "towline.dev/requester"
	// requesterLength is how many hexadecimal digits of the hash there are: a label has room for 63.
	requesterLength = 40
)

// LetRead lets whoever made csr read it, and nothing else, as long as it exists, and is among the last that he was let
// read. hub must read from the API server.
func LetRead(ctx context.Context, hub client.Client, csr *certificatesv1.CertificateSigningRequest) error {
	// The uid keeps a later request of that name out of it.
	name := "system:karmada:csr:" + string(csr.UID)
	sum := sha256.Sum256([]byte(csr.Spec.Username))
	requester := client.MatchingLabels{requesterLabel: hex.EncodeToString(sum[:])[:requesterLength]}
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
		if err := ensure(ctx, hub, obj); err != nil {
			return err
		}
	}
	return errors.Join(
		keepReadable(ctx, hub, &rbacv1.ClusterRoleBindingList{}, requester, name),
		keepReadable(ctx, hub, &rbacv1.ClusterRoleList{}, requester, name))
}

// keepReadable deletes the oldest of what lets a requester read, beyond what he may have, and in any case not the one
// with the name latest.
func keepReadable(ctx context.Context, hub client.Client, list client.ObjectList, requester client.MatchingLabels, latest string) error {
	if err := hub.List(ctx, list, requester); err != nil {
		return fmt.Errorf("list what the requester may read: %w", err)
	}
	var earlier []client.Object
	err := meta.EachListItem(list, func(item runtime.Object) error {
		if obj, ok := item.(client.Object); ok && obj.GetName() != latest {
			earlier = append(earlier, obj)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list what the requester may read: %w", err)
	}
	slices.SortFunc(earlier, func(a, b client.Object) int {
		return cmp.Or(b.GetCreationTimestamp().Compare(a.GetCreationTimestamp().Time), strings.Compare(a.GetName(), b.GetName()))
	})
	for _, obj := range earlier[min(len(earlier), readable-1):] {
		if err := hub.Delete(ctx, obj); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete %s, which lets an old answer be read: %w", obj.GetName(), err)
		}
	}
	return nil
}

// ownRules are about what bears the cluster's own name, and the next certificate.
func ownRules(cluster string) []rbacv1.PolicyRule {
	self := []string{cluster}
	return []rbacv1.PolicyRule{
		{APIGroups: []string{clusterv1alpha1.GroupVersion.Group}, Resources: []string{"clusters"}, ResourceNames: self, Verbs: []string{"get", "list", "watch", "patch", "delete"}},
		{APIGroups: []string{clusterv1alpha1.GroupVersion.Group}, Resources: []string{"clusters/status"}, ResourceNames: self, Verbs: []string{"get", "patch"}},
		{APIGroups: []string{certificatesv1.GroupName}, Resources: []string{"certificatesigningrequests"}, Verbs: []string{"create"}},
	}
}

// spaceRules are about the execution space, which holds nothing of any other cluster.
func spaceRules(cluster string) []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{APIGroups: []string{workv1alpha1.GroupVersion.Group}, Resources: []string{"works"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{APIGroups: []string{workv1alpha1.GroupVersion.Group}, Resources: []string{"works/status"}, Verbs: []string{"get", "patch"}},
		{APIGroups: []string{coordinationv1.GroupName}, Resources: []string{"leases"}, ResourceNames: []string{cluster}, Verbs: []string{"get", "update", "patch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups/status"}, Verbs: []string{"get", "patch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationbundles"}, Verbs: []string{"get"}},
	}
}

// ensureSpace makes the execution space if it is not there, and returns it then. What else is written on it is for
// whoever looks after execution spaces.
func ensureSpace(ctx context.Context, hub client.Client, c *clusterv1alpha1.Cluster) (*corev1.Namespace, error) {
	space := karmada.NewSpace(c)
	err := hub.Create(ctx, space, client.FieldOwner(kube.FieldManager))
	switch {
	case apierrors.IsAlreadyExists(err):
		return nil, nil //nolint:nilnil // nothing was made
	case err != nil:
		return nil, fmt.Errorf("create namespace %s: %w", space.Name, err)
	}
	return space, nil
}

// ensureLease makes the Lease of the agent if it is not there, and makes that of an earlier Cluster of its name anew:
// it says nothing of this one.
func ensureLease(ctx context.Context, hub client.Client, c *clusterv1alpha1.Cluster) error {
	lease := &coordinationv1.Lease{ObjectMeta: named(fleet.ExecutionSpace(c.Name), c.Name)}
	err := hub.Get(ctx, client.ObjectKeyFromObject(lease), lease)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read Lease %s: %w", client.ObjectKeyFromObject(lease), err)
	}
	if err == nil {
		if karmada.Marked(lease) == c.UID {
			return nil
		}
		uid := lease.UID
		if err := hub.Delete(ctx, lease, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete Lease %s: %w", client.ObjectKeyFromObject(lease), err)
		}
	}
	made := &coordinationv1.Lease{ObjectMeta: named(lease.Namespace, lease.Name), Spec: coordinationv1.LeaseSpec{LeaseDurationSeconds: ptr.To[int32](leaseSeconds)}}
	karmada.Mark(made, c)
	// Another Grant of the same Cluster may have been faster.
	if err := hub.Create(ctx, made, client.FieldOwner(kube.FieldManager)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create Lease %s: %w", client.ObjectKeyFromObject(made), err)
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
