package join

import (
	"context"
	"errors"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

// ErrDeregistering is returned for a cluster that is being deregistered.
var ErrDeregistering = errors.New("it is being deregistered; wait until that is done")

// Establish creates or repairs the objects on the hub for the agent of an existing pull-mode SveltosCluster: delivery
// namespace and claim, ServiceAccount, anchor Secret, Lease, Roles and RoleBindings. It returns the delivery namespace.
// First it creates the policy of EnsureTokenPolicy if the policy is missing. It writes only objects that must change.
// It returns ErrForeign if another party created one of the objects, ErrDeregistering if the cluster is being deleted,
// and kube.ErrNoAdmissionPolicies if the hub cannot limit the tokens of agents. Manifests creates the registration
// Secret. hub must read from the API server.
func Establish(ctx context.Context, hub client.Client, cluster *libv1beta1.SveltosCluster) (delivery string, err error) {
	if err := enforceTokenPolicy(ctx, hub); err != nil {
		return "", err
	}
	r := registrationOf(hub, cluster)
	live, found, err := findCluster(ctx, hub, r.request)
	switch {
	case err != nil:
		return "", err
	case !found:
		return "", fmt.Errorf("SveltosCluster %s: %w", r.request.key(), ErrNotRegistered)
	case live.DeletionTimestamp != nil:
		return "", ErrDeregistering
	}
	if delivery, err = r.claimedDeliveryNamespace(ctx, r.hub); delivery == "" && err == nil {
		delivery, err = r.claimFreeNamespace(ctx, live)
	}
	if err != nil {
		return "", err
	}
	if err := r.annotateCluster(ctx, live, delivery); err != nil {
		return "", err
	}
	return delivery, r.ensureAgentIdentity(ctx, live, delivery)
}

// EstablishNew is Establish for a SveltosCluster that the caller has just created. It creates the other objects without
// reading them first, and reads namespaces and Leases from cache. If the cache is stale, it reads the namespace from
// the hub and repeats the write of the claim. The caller must have called EnsureSharedObjects before.
func EstablishNew(ctx context.Context, hub client.Client, cache client.Reader, cluster *libv1beta1.SveltosCluster) (delivery string, err error) {
	if err := enforceTokenPolicy(ctx, hub); err != nil {
		return "", err
	}
	r := registrationOf(hub, cluster)
	r.cache, r.isNew = cache, true
	claimed, err := claimedNamespaces(ctx, cache, r.request)
	if err != nil {
		return "", err
	}
	if len(claimed) > 0 {
		return Establish(ctx, hub, cluster)
	}
	if delivery, err = r.claimFreeNamespace(ctx, cluster); err != nil {
		return "", err
	}
	if err := r.annotateCluster(ctx, cluster.DeepCopy(), delivery); err != nil {
		return "", err
	}
	err = r.ensureAgentIdentity(ctx, cluster, delivery)
	if apierrors.IsNotFound(err) {
		// kube.AgentNamespace has been deleted since EnsureSharedObjects.
		return Establish(ctx, hub, cluster)
	}
	return delivery, err
}

// RestoreDeliveryAnnotation writes the claimed delivery namespace to the annotation of a SveltosCluster, if the
// annotation was lost or changed. Without a claim, or without the SveltosCluster, it does nothing. The cluster may be
// in deletion.
func RestoreDeliveryAnnotation(ctx context.Context, hub client.Client, cluster *libv1beta1.SveltosCluster) error {
	r := registrationOf(hub, cluster)
	claimed, err := r.claimedDeliveryNamespace(ctx, r.hub)
	if claimed == "" || err != nil {
		return err
	}
	live, found, err := findCluster(ctx, hub, r.request)
	if !found || err != nil {
		return err
	}
	return r.annotateCluster(ctx, live, claimed)
}

func (r *registration) annotateCluster(ctx context.Context, cluster *libv1beta1.SveltosCluster, delivery string) error {
	if namespace, isForeign := fleet.DeliveryNamespace(cluster); namespace == delivery && !isForeign {
		return nil
	}
	before := cluster.DeepCopy()
	metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationDeliveryNS, delivery)
	if err := r.hub.Patch(ctx, cluster, client.MergeFrom(before), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("write the delivery namespace of SveltosCluster %s: %w", r.request.key(), err)
	}
	return nil
}

func clusterOwner(cluster *libv1beta1.SveltosCluster) metav1.OwnerReference {
	return metav1.OwnerReference{
		APIVersion: libv1beta1.GroupVersion.String(), Kind: "SveltosCluster", Name: cluster.Name, UID: cluster.UID,
	}
}

// ensureAgentIdentity creates the objects that the agent needs on the hub.
func (r *registration) ensureAgentIdentity(ctx context.Context, cluster *libv1beta1.SveltosCluster, delivery string) error {
	if !r.isNew {
		if err := EnsureSharedObjects(ctx, r.hub); err != nil {
			return err
		}
	}
	for _, obj := range agentIdentity(r.request, cluster, delivery) {
		if err := r.apply(ctx, obj, r.checkOwn); err != nil {
			return err
		}
	}
	return nil
}

// EnsureSharedObjects creates the objects on the hub that all agents need: kube.AgentNamespace and the Role of
// EnsureSharedRole.
func EnsureSharedObjects(ctx context.Context, hub client.Client) error {
	if err := EnsureNamespace(ctx, hub, &corev1.Namespace{ObjectMeta: objectMeta("", kube.AgentNamespace)}); err != nil {
		return err
	}
	_, err := EnsureSharedRole(ctx, hub)
	return err
}

// EnsureSharedRole creates or repairs the Role in kube.AgentNamespace with which agents read shared bundles, see
// sharedRole, and returns its name. The namespace must exist.
func EnsureSharedRole(ctx context.Context, hub client.Client) (name string, err error) {
	_, _, err = rollback.New(hub, "").Apply(ctx, desiredSharedRole(), nil)
	return sharedRole, err
}

// deleteObject deletes obj. It returns a conflict if the object was deleted and created again since its read.
func deleteObject(ctx context.Context, c client.Client, obj client.Object) error {
	uid := obj.GetUID()
	if err := c.Delete(ctx, obj, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %s: %w", kube.RefIn(c.Scheme(), obj), err)
	}
	return nil
}

// ensureRegistrationSecret reads or creates the Secret to which the tokens of manifests are bound.
func (r *registration) ensureRegistrationSecret(ctx context.Context, owner metav1.OwnerReference) (*corev1.Secret, error) {
	secret := &corev1.Secret{ObjectMeta: objectMeta(r.request.Namespace, RegistrationSecret(r.request.Name))}
	secret.OwnerReferences = []metav1.OwnerReference{owner}
	return secret, r.applyOwn(ctx, secret)
}

// renewRegistrationSecret is ensureRegistrationSecret, but it replaces a Secret whose token the agent has exchanged for
// one of its own: the hub is about to delete that Secret, which would invalidate a new token.
func (r *registration) renewRegistrationSecret(ctx context.Context, owner metav1.OwnerReference, delivery string) (*corev1.Secret, error) {
	secret, err := r.ensureRegistrationSecret(ctx, owner)
	if err != nil {
		return nil, err
	}
	lease := &coordinationv1.Lease{}
	_, err = read(ctx, r.hub, lease, client.ObjectKey{Namespace: delivery, Name: r.request.Name})
	if err != nil || lease.Annotations[kube.AnnotationExchanged] != string(secret.UID) {
		return secret, err
	}
	if err := deleteObject(ctx, r.hub, secret); err != nil {
		return nil, err
	}
	return r.ensureRegistrationSecret(ctx, owner)
}

// revokeTokens invalidates all tokens of a cluster: it deletes the objects to which they are bound.
func (r *registration) revokeTokens(ctx context.Context) error {
	r.isRevoked = true
	for name, obj := range map[string]client.Object{
		AnchorSecret(r.request.Name): &corev1.Secret{}, RegistrationSecret(r.request.Name): &corev1.Secret{}, r.request.Name: &corev1.ServiceAccount{},
	} {
		found, err := read(ctx, r.hub, obj, client.ObjectKey{Namespace: r.request.Namespace, Name: name})
		switch {
		case err != nil:
			return err
		case !found:
			continue
		case obj.GetLabels()[registrationLabel] != r.request.Name:
			return fmt.Errorf("%s %w", kube.RefIn(r.hub.Scheme(), obj), ErrForeign)
		}
		if err := deleteObject(ctx, r.hub, obj); err != nil {
			return err
		}
	}
	return nil
}

// sharedRole is the Role in kube.AgentNamespace with which agents read shared bundles. It permits get for all names:
// the names are HMACs, and an agent that may not list or watch can get only names that the hub has sent to it.
const sharedRole = "towline-shared-bundles"

// AnchorSecret returns the name of the Secret, in the namespace of the SveltosCluster, to which the tokens of the
// cluster's agent are bound. It has no data. After its deletion the tokens are invalid.
func AnchorSecret(cluster string) string { return cluster + anchorSuffix }

const anchorSuffix = "-sveltos-agent"

// RegistrationSecret returns the name of the Secret, in the namespace of the SveltosCluster, to which the tokens of the
// cluster's manifests are bound. While the cluster waits for its agent, the Secret contains a manifest and its token.
func RegistrationSecret(cluster string) string { return cluster + "-sveltos-registration" }

// agentIdentity returns the desired objects of the agent's identity on the hub, in the order of their creation. The
// SveltosCluster owns the objects in its namespace.
func agentIdentity(r Request, cluster *libv1beta1.SveltosCluster, delivery string) []client.Object {
	clusterRules := clusterNamespaceRules(r)
	if delivery == r.Namespace {
		clusterRules = append(clusterRules, deliveryNamespaceRules(r)...)
	}
	objects := []client.Object{
		&corev1.ServiceAccount{ObjectMeta: objectMeta(r.Namespace, r.Name)},
		&corev1.Secret{ObjectMeta: objectMeta(r.Namespace, AnchorSecret(r.Name))},
		&coordinationv1.Lease{ObjectMeta: objectMeta(delivery, r.Name)}, // the agent writes its spec
		role(r.Namespace, r.Name, clusterRules), agentRoleBinding(r, r.Namespace, r.Name, r.Name),
	}
	if delivery != r.Namespace {
		objects = append(objects, role(delivery, r.Name, deliveryNamespaceRules(r)), agentRoleBinding(r, delivery, r.Name, r.Name))
	}
	objects = append(objects, agentRoleBinding(r, kube.AgentNamespace, sharedBinding(r), sharedRole))
	for _, obj := range objects {
		if obj.GetNamespace() == r.Namespace {
			obj.SetOwnerReferences([]metav1.OwnerReference{clusterOwner(cluster)})
		}
		withRegistrationLabel(obj, r.Name)
	}
	return objects
}

// sharedBinding returns the name of a cluster's RoleBinding in kube.AgentNamespace. It is unique, since DNS labels have
// no colon.
func sharedBinding(r Request) string { return r.Namespace + ":" + r.Name }

// clusterNamespaceRules are the rules for the objects with the name of the cluster in its namespace.
func clusterNamespaceRules(r Request) []rbacv1.PolicyRule {
	self := []string{r.Name}
	return []rbacv1.PolicyRule{
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"sveltosclusters"}, ResourceNames: self, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"sveltosclusters/status"}, ResourceNames: self, Verbs: []string{"patch"}},
		{APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"}, ResourceNames: self, Verbs: []string{"create"}},
	}
}

// deliveryNamespaceRules are the rules for the delivery namespace, which has no objects of other clusters.
func deliveryNamespaceRules(r Request) []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups/status"}, Verbs: []string{"patch"}},
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationbundles"}, Verbs: []string{"get"}},
		{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{fleet.ContentKeySecret(r.Name)}, Verbs: []string{"get"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{r.Name}, Verbs: []string{"get", "update", "patch"}},
	}
}

func desiredSharedRole() *rbacv1.Role {
	return role(kube.AgentNamespace, sharedRole, []rbacv1.PolicyRule{
		{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationbundles"}, Verbs: []string{"get"}},
	})
}

func role(namespace, name string, rules []rbacv1.PolicyRule) *rbacv1.Role {
	return &rbacv1.Role{ObjectMeta: objectMeta(namespace, name), Rules: rules}
}

// agentRoleBinding gives the agent of r the Role roleName in namespace.
func agentRoleBinding(r Request, namespace, name, roleName string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: objectMeta(namespace, name),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: roleName},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: r.Namespace, Name: r.Name}},
	}
}

func objectMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}
