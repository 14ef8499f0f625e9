package karmada

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// accountPrefix and the name of a cluster make the name of the hub's account on it, rolePrefix and that of the account
	// the name of its role.
	accountPrefix = "karmada-"
	rolePrefix    = "karmada-controller-manager:"
	// impersonator is the account by which hubs act as their own users.
	impersonator = "karmada-impersonator"
	// userPrefix begins the annotations of shared objects that say who uses them: one for each cluster of each hub.
	userPrefix = "hub.towline.dev/"
	// maxAnnotationName is how long the part of an annotation's key after the domain may be.
	maxAnnotationName = 63
)

// footprint is what the registration of one cluster leaves on it. Some of it is shared with other registrations of the
// same member: the namespace and the impersonator.
type footprint struct {
	member                    client.Client
	cluster, namespace, hubID string
}

func (f footprint) account() string { return accountPrefix + f.cluster }
func (f footprint) role() string    { return rolePrefix + f.account() }

// user is the annotation's key by which shared objects know this registration.
func (f footprint) user() string {
	const prefix = 20
	name := f.hubID + "." + f.cluster
	if len(name) > maxAnnotationName {
		sum := sha256.Sum256([]byte(name))
		name = name[:prefix] + "." + hex.EncodeToString(sum[:prefix])
	}
	return userPrefix + name
}

// own are the objects that no other registration uses, as they are to be, the account's token last.
func (f footprint) own() []client.Object {
	all := []string{rbacv1.APIGroupAll}
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: f.meta(f.namespace, f.account())},
		&rbacv1.ClusterRole{ObjectMeta: f.meta("", f.role()), Rules: []rbacv1.PolicyRule{
			{APIGroups: all, Resources: all, Verbs: all}, {NonResourceURLs: all, Verbs: []string{"get"}},
		}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: f.meta("", f.role()),
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: f.role()},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: f.namespace, Name: f.account()}},
		},
		tokenSecret(f.meta(f.namespace, f.account())),
	}
}

// shared are the objects that other registrations may use too, in the order in which they are made.
func (f footprint) shared() []client.Object {
	return []client.Object{
		&corev1.Namespace{ObjectMeta: system("", f.namespace)},
		&corev1.ServiceAccount{ObjectMeta: system(f.namespace, impersonator)},
		tokenSecret(system(f.namespace, impersonator)),
	}
}

// meta is the metadata of an object of our own.
func (f footprint) meta(namespace, name string) metav1.ObjectMeta {
	meta := system(namespace, name)
	meta.Annotations = map[string]string{kube.AnnotationHub: f.hubID}
	return meta
}

// system is the metadata of what a registration makes.
func system(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true"}}
}

// tokenSecret is what the token of the account of the same name is put into.
func tokenSecret(meta metav1.ObjectMeta) *corev1.Secret {
	metav1.SetMetaDataAnnotation(&meta, corev1.ServiceAccountNameKey, meta.Name)
	return &corev1.Secret{ObjectMeta: meta, Type: corev1.SecretTypeServiceAccountToken}
}

// isOurs says whether a registration of this hub made live.
func (f footprint) isOurs(live client.Object) bool {
	return live.GetLabels()[clusterv1alpha1.SystemLabel] == "true" && live.GetAnnotations()[kube.AnnotationHub] == f.hubID
}

// isShared says whether registrations made live, which know it by their annotations.
func isShared(live client.Object) bool {
	return live.GetLabels()[clusterv1alpha1.SystemLabel] == "true" && len(usersOf(live)) > 0
}

// usersOf lists the annotations by which registrations use live.
func usersOf(live client.Object) []string {
	var users []string
	for key := range live.GetAnnotations() {
		if strings.HasPrefix(key, userPrefix) {
			users = append(users, key)
		}
	}
	return users
}

// check refuses a member on which another hub has a cluster of this name.
func (f footprint) check(ctx context.Context) error {
	for _, obj := range f.own() {
		live, found, err := f.find(ctx, obj)
		if err != nil {
			return err
		}
		if found {
			if err := f.checkHub(live); err != nil {
				return err
			}
		}
	}
	return nil
}

func (f footprint) checkHub(live client.Object) error {
	if hub := live.GetAnnotations()[kube.AnnotationHub]; hub != "" && hub != f.hubID {
		return fmt.Errorf("%s on the cluster: it was joined to another hub as %s; choose another name", f.ref(live), f.cluster)
	}
	return nil
}

// find reads the object that has the kind and the name of obj.
func (f footprint) find(ctx context.Context, obj client.Object) (live client.Object, found bool, err error) {
	live = obj.DeepCopyObject().(client.Object)
	if err := f.member.Get(ctx, client.ObjectKeyFromObject(obj), live); err != nil {
		if client.IgnoreNotFound(err) == nil {
			return nil, false, nil
		}
		return nil, false, fmt.Errorf("read %s on the cluster: %w", f.ref(obj), err)
	}
	return live, true, nil
}

// ref names obj for people and in reports.
func (f footprint) ref(obj client.Object) kube.Ref {
	ref := kube.Ref{Namespace: obj.GetNamespace(), Name: obj.GetName()}
	// Every kind here is in the scheme.
	if gvk, err := apiutil.GVKForObject(obj, f.member.Scheme()); err == nil {
		ref.Group, ref.Version, ref.Kind = gvk.Group, gvk.Version, gvk.Kind
	}
	return ref
}
