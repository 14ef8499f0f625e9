package karmada

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

const (
	// accountPrefix is the prefix of the hub's ServiceAccount on a cluster, rolePrefix the prefix of its ClusterRole.
	accountPrefix = "karmada-"
	rolePrefix    = "karmada-controller-manager:"
	// impersonator is the ServiceAccount with which hubs impersonate their users.
	impersonator = "karmada-impersonator"
	// tokenTimeout limits each wait for the member's token controller, as in Karmada.
	tokenTimeout = 30 * time.Second
	// pollInterval is the interval between two reads in a wait.
	pollInterval = 100 * time.Millisecond
)

// memberRegistration has the objects of one registration on a cluster. The ClusterRole is written first, and owns the
// other objects except the namespace: its deletion deletes them all. The impersonator is shared by hubs, and their
// ClusterRoles own it. All objects have an annotation with the ID of the hub that created them.
type memberRegistration struct {
	client                    client.Client
	resources                 foreign.Resources
	writer                    *rollback.Writer
	cluster, namespace, hubID string
	// isResumed is true if another run created the ClusterRole.
	isResumed bool
}

func newMemberRegistration(config *rest.Config, cluster, namespace, attempt string) (*memberRegistration, error) {
	memberClient, resources, err := join.NewClient(config, requestTimeout)
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	return &memberRegistration{
		client: memberClient, resources: resources, writer: rollback.New(memberClient, attempt), cluster: cluster, namespace: namespace,
	}, nil
}

func (m *memberRegistration) accountName() string { return accountPrefix + m.cluster }
func (m *memberRegistration) roleName() string    { return rolePrefix + m.accountName() }

// objectMeta returns the metadata of an object of this registration on the member.
func (m *memberRegistration) objectMeta(namespace, name string) metav1.ObjectMeta {
	meta := systemMeta(namespace, name)
	meta.Annotations = map[string]string{kube.AnnotationHub: m.hubID}
	return meta
}

// systemMeta returns the metadata of an object of any registration.
func systemMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true"}}
}

// clusterObjects returns the desired objects of this cluster, the ClusterRole first, without the shared impersonator.
func (m *memberRegistration) clusterObjects() []client.Object {
	all := []string{rbacv1.APIGroupAll}
	return append([]client.Object{
		&rbacv1.ClusterRole{ObjectMeta: m.objectMeta("", m.roleName()), Rules: []rbacv1.PolicyRule{
			{APIGroups: all, Resources: all, Verbs: all}, {NonResourceURLs: all, Verbs: []string{"get"}},
		}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: m.objectMeta("", m.roleName()),
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: m.roleName()},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: m.namespace, Name: m.accountName()}},
		},
	}, m.accountObjects(m.accountName())...)
}

func (m *memberRegistration) accountObjects(name string) []client.Object {
	secret := &corev1.Secret{ObjectMeta: m.objectMeta(m.namespace, name), Type: corev1.SecretTypeServiceAccountToken}
	secret.Annotations[corev1.ServiceAccountNameKey] = name
	return []client.Object{&corev1.ServiceAccount{ObjectMeta: m.objectMeta(m.namespace, name)}, secret}
}

// getRole reads the ClusterRole. It also returns the error of checkOwner for it.
func (m *memberRegistration) getRole(ctx context.Context) (role *rbacv1.ClusterRole, found bool, err error) {
	role = &rbacv1.ClusterRole{}
	err = m.client.Get(ctx, client.ObjectKey{Name: m.roleName()}, role)
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read ClusterRole %s on the cluster: %w", m.roleName(), err)
	}
	return role, true, m.checkOwner(role)
}

// checkOwner returns an error unless this hub created live.
func (m *memberRegistration) checkOwner(live client.Object) error {
	switch {
	case !isRegistered(live):
		return fmt.Errorf("%s on the cluster: it was not made by a registration; choose another name", kube.RefIn(m.client.Scheme(), live))
	case !m.isOwn(live):
		return fmt.Errorf("%s on the cluster: it was joined to another hub as %s; choose another name", kube.RefIn(m.client.Scheme(), live), m.cluster)
	}
	return nil
}

// isOwn returns whether a registration by this hub created live.
func (m *memberRegistration) isOwn(live client.Object) bool {
	return isRegistered(live) && live.GetAnnotations()[kube.AnnotationHub] == m.hubID
}

// credential has a token and the certificate authorities of the member, in PEM.
type credential struct{ token, authority []byte }

// ensure creates or updates all objects, and returns the credentials of the hub's account and of the impersonator.
func (m *memberRegistration) ensure(ctx context.Context) (account, impersonation credential, err error) {
	if err := m.apply(ctx); err != nil {
		return account, impersonation, err
	}
	impersonation, err = m.awaitToken(ctx, impersonator)
	if err != nil {
		return account, impersonation, fmt.Errorf("failed to get serviceAccount secret for impersonation from cluster(%s), error: %w", m.cluster, err)
	}
	account, err = m.awaitToken(ctx, m.accountName())
	if err != nil {
		return account, impersonation, fmt.Errorf("failed to get serviceAccount secret from cluster(%s), error: %w", m.cluster, err)
	}
	return account, impersonation, nil
}

// apply writes all objects. It does not change an existing namespace, and of an existing impersonator only the owners.
func (m *memberRegistration) apply(ctx context.Context) error {
	check := func(live *unstructured.Unstructured) error { return m.checkOwner(live) }
	own := m.clusterObjects()
	role, _, err := m.writer.Apply(ctx, own[0], func(live *unstructured.Unstructured) error {
		m.isResumed = m.isResumed || !m.writer.IsLastWriter(live)
		return m.checkOwner(live)
	})
	if err != nil {
		return fmt.Errorf("on the cluster: %w", err)
	}
	if err := join.EnsureNamespace(ctx, m.client, &corev1.Namespace{ObjectMeta: m.objectMeta("", m.namespace)}); err != nil {
		return fmt.Errorf("on the cluster: %w", err)
	}
	for _, obj := range m.accountObjects(impersonator) {
		if err := m.ensureShared(ctx, obj, role); err != nil {
			return fmt.Errorf("write %s on the cluster: %w", kube.RefIn(m.client.Scheme(), obj), err)
		}
	}
	for _, obj := range own[1:] {
		obj.SetOwnerReferences([]metav1.OwnerReference{join.ClusterRoleOwner(role)})
		if _, _, err := m.writer.Apply(ctx, obj, check); err != nil {
			return fmt.Errorf("on the cluster: %w", err)
		}
	}
	return nil
}

// ensureShared creates obj, or adds role to the owners of the existing object. The garbage collector deletes the object
// after its last owner.
func (m *memberRegistration) ensureShared(ctx context.Context, obj, role client.Object) error {
	obj.SetOwnerReferences([]metav1.OwnerReference{join.ClusterRoleOwner(role)})
	err := m.client.Create(ctx, obj, client.FieldOwner(kube.FieldManager))
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	if err := m.client.Get(ctx, client.ObjectKeyFromObject(obj), obj); err != nil || !isRegistered(obj) {
		return err
	}
	owner := join.ClusterRoleOwner(role)
	// A strategic merge patch keeps the other owners.
	patch := fmt.Appendf(nil, `{"metadata":{"ownerReferences":[{"apiVersion":%q,"kind":%q,"name":%q,"uid":%q}]}}`, owner.APIVersion, owner.Kind, owner.Name, owner.UID)
	return m.client.Patch(ctx, obj, client.RawPatch(types.StrategicMergePatchType, patch), client.FieldOwner(kube.FieldManager))
}

// awaitToken waits until an account's Secret has a token. If the Secret does not exist, it writes all objects again:
// the garbage collector may have deleted them late, with the owner of an earlier registration.
func (m *memberRegistration) awaitToken(ctx context.Context, account string) (credential, error) {
	var got credential
	err := wait.PollUntilContextTimeout(ctx, pollInterval, tokenTimeout, true, func(context.Context) (bool, error) {
		secret := &corev1.Secret{}
		err := m.client.Get(ctx, client.ObjectKey{Namespace: m.namespace, Name: account}, secret)
		if apierrors.IsNotFound(err) {
			return false, m.apply(ctx)
		}
		got = credential{token: secret.Data[corev1.ServiceAccountTokenKey], authority: secret.Data[corev1.ServiceAccountRootCAKey]}
		return len(got.token) > 0, err
	})
	if err != nil {
		return credential{}, fmt.Errorf("failed to get serviceAccount secret, error: %w", err)
	}
	return got, nil
}

// DeleteMemberObjects deletes the objects of a cluster's registration on the member, and returns them. hubID is the ID
// of the hub that registered it. The namespace and the impersonator are deleted only if nothing else uses them. member
// may use the hub's ServiceAccount: the last request deletes the ClusterRole, and the garbage collector deletes its
// dependents. It can be interrupted and repeated.
func DeleteMemberObjects(ctx context.Context, member *rest.Config, cluster, clusterNamespace, hubID string) (removed []kube.Ref, err error) {
	m, err := newMemberRegistration(member, cluster, clusterNamespace, "")
	if err != nil {
		return nil, err
	}
	m.hubID = hubID
	return m.deleteObjects(ctx)
}

func (m *memberRegistration) deleteObjects(ctx context.Context) (removed []kube.Ref, err error) {
	role := &rbacv1.ClusterRole{}
	err = m.client.Get(ctx, client.ObjectKey{Name: m.roleName()}, role)
	if apierrors.IsNotFound(err) || err == nil && (!m.isOwn(role) || !role.DeletionTimestamp.IsZero()) {
		return nil, nil
	}
	if err == nil {
		err = m.setNamespaceOwner(ctx, role)
	}
	if err == nil {
		err = m.client.Delete(ctx, role, client.Preconditions{UID: &role.UID}, client.PropagationPolicy(metav1.DeletePropagationBackground))
	}
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("remove the registration of cluster %s from it: %w", m.cluster, err)
	}
	for _, obj := range m.clusterObjects() {
		removed = append(removed, kube.RefIn(m.client.Scheme(), obj))
	}
	return removed, nil
}

// setNamespaceOwner makes role the owner of the namespace, if a registration created the namespace and it has no
// foreign objects. Otherwise it removes the owner that an interrupted run has set.
func (m *memberRegistration) setNamespaceOwner(ctx context.Context, role client.Object) error {
	namespace := &corev1.Namespace{}
	err := m.client.Get(ctx, client.ObjectKey{Name: m.namespace}, namespace)
	if err != nil || !isRegistered(namespace) || m.namespace == systemNamespace {
		return client.IgnoreNotFound(err)
	}
	reason, err := foreign.ReasonToKeep(ctx, m.client, m.resources, m.namespace, func(item *metav1.PartialObjectMetadata) bool {
		return (item.Name == m.accountName() || item.Name == impersonator) && isRegistered(item)
	})
	if err != nil {
		return err
	}
	before := namespace.DeepCopy()
	namespace.OwnerReferences = slices.DeleteFunc(namespace.OwnerReferences, func(ref metav1.OwnerReference) bool { return ref.UID == role.GetUID() })
	if reason == "" {
		namespace.OwnerReferences = []metav1.OwnerReference{join.ClusterRoleOwner(role)}
	}
	return client.IgnoreNotFound(m.client.Patch(ctx, namespace, client.MergeFrom(before), client.FieldOwner(kube.FieldManager)))
}

// isRegistered returns whether a registration by a hub created live.
func isRegistered(live client.Object) bool {
	return live.GetLabels()[clusterv1alpha1.SystemLabel] == "true" && live.GetAnnotations()[kube.AnnotationHub] != ""
}
