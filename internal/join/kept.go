package join

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// Kept is an object on the hub that a deregistration does not delete: it has the name of an object of the cluster's
// registration, and no registration of Towline created it.
type Kept struct {
	Ref kube.Ref
}

// String returns the reason, and the command that deletes the object.
func (k Kept) String() string {
	command := "kubectl delete " + strings.ToLower(k.Ref.Kind) + " " + k.Ref.Name
	if k.Ref.Namespace != "" {
		command += " -n " + k.Ref.Namespace
	}
	return fmt.Sprintf("%s: Towline did not create it; to delete it: %s", k.Ref, command)
}

// findKept finds the objects without the registration label that have the names of a registration, of Towline or of the
// sveltosctl of Sveltos. Objects that may not be read are not found.
func (r *retraction) findKept(ctx context.Context) ([]Kept, error) {
	q := r.request
	objects := []client.Object{
		&corev1.Secret{ObjectMeta: named(q.Namespace, r.kubeconfigSecret())},
		&corev1.Secret{ObjectMeta: named(q.Namespace, AuthoritySecret(q.Name))},
	}
	if r.cluster.Spec.PullMode {
		objects = append(objects,
			&corev1.ServiceAccount{ObjectMeta: named(q.Namespace, q.Name)},
			&corev1.Secret{ObjectMeta: named(q.Namespace, q.Name)},
			&rbacv1.Role{ObjectMeta: named(q.Namespace, q.Name)},
			&rbacv1.ClusterRole{ObjectMeta: named("", q.Namespace+"-"+q.Name)},
			&rbacv1.RoleBinding{ObjectMeta: named(q.Namespace, q.Name)},
			&rbacv1.ClusterRoleBinding{ObjectMeta: named("", q.Namespace+"-"+q.Name)})
	}
	var kept []Kept
	for _, obj := range objects {
		found, err := read(ctx, r.hub, obj, client.ObjectKeyFromObject(obj))
		if err != nil && !apierrors.IsForbidden(err) {
			return nil, err
		}
		if found && obj.GetLabels()[registrationLabel] == "" && r.isIdentity(obj) {
			kept = append(kept, Kept{Ref: refOf(r.hub, obj)})
		}
	}
	return kept, nil
}

// isIdentity returns false for a Secret or a binding that only has the name of one of the sveltosctl of Sveltos, and
// has nothing to do with the ServiceAccount of the cluster's agent.
func (r *retraction) isIdentity(obj client.Object) bool {
	isAccount := func(s rbacv1.Subject) bool {
		return s.Kind == rbacv1.ServiceAccountKind && s.Namespace == r.request.Namespace && s.Name == r.request.Name
	}
	switch obj := obj.(type) {
	case *corev1.Secret:
		return obj.Name != r.request.Name || obj.Annotations[corev1.ServiceAccountNameKey] == r.request.Name
	case *rbacv1.RoleBinding:
		return slices.ContainsFunc(obj.Subjects, isAccount)
	case *rbacv1.ClusterRoleBinding:
		return slices.ContainsFunc(obj.Subjects, isAccount)
	}
	return true
}
