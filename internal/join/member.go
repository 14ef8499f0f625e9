package join

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// AnnotationMemberIdentity is "true" on a SveltosCluster whose registration made, or uses, an identity on the member
// for the hub. On the member, the label of the same name marks the objects of that identity which registrations made.
const AnnotationMemberIdentity = "towline.dev/member-identity"

const (
	// memberIdentityName is the name of the ServiceAccount, the ClusterRole and the ClusterRoleBinding, as the Sveltos
	// surface has it.
	memberIdentityName = "projectsveltos"
	// memberUserPrefix begins the annotations of the ClusterRole that say who uses the identity, one for each
	// registration.
	memberUserPrefix = "registration.towline.dev/"
	// memberWait bounds the waits for the member's own controllers.
	memberWait = 10 * time.Second
)

// identity is the way into a member that the registrations of all hubs share: a ServiceAccount which may do everything.
// Its anchor is the ClusterRole, which lists its users and owns the other objects. Each object is either ours, by its
// label, or was there before; those are used as they are.
type identity struct {
	member kubernetes.Interface
	// account is the ServiceAccount.
	account client.ObjectKey
	// userKey and user are the annotation by which the ClusterRole knows this user.
	userKey string
	user    string
	attempt string
	// role is the ClusterRole once enter has run.
	role *rbacv1.ClusterRole
	undo []func(context.Context) error
}

// HubUID returns the uid of the hub's kube-system namespace, which tells a member's hubs apart.
func HubUID(ctx context.Context, hub client.Reader) (string, error) {
	namespace := &corev1.Namespace{}
	if err := hub.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, namespace); err != nil {
		return "", fmt.Errorf("read namespace %s: %w", metav1.NamespaceSystem, err)
	}
	return string(namespace.UID), nil
}

// registeredIdentity is the identity as the registration of the SveltosCluster namespace/name on a hub uses it.
func registeredIdentity(member *rest.Config, hubUID string, cluster client.ObjectKey) (*identity, error) {
	i, err := newIdentity(member, client.ObjectKey{Namespace: kube.AgentNamespace, Name: memberIdentityName})
	if err != nil {
		return nil, err
	}
	i.userKey = memberUserPrefix + shortHash(hubUID+"/"+cluster.String())
	i.user = fmt.Sprintf("cluster %s of hub %s, attempt %s", cluster, hubUID, i.attempt)
	return i, nil
}

func newIdentity(member *rest.Config, account client.ObjectKey) (*identity, error) {
	config := rest.CopyConfig(member)
	config.QPS, config.Burst = registrationQPS, registrationQPS
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	return &identity{member: clientset, account: account, attempt: string(uuid.NewUUID())}, nil
}

// shortHash returns 20 characters that stand for text in a name.
func shortHash(text string) string {
	const length = 20
	sum := sha256.Sum256([]byte(text))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:length]
}

// provide makes or repairs the identity, and enters its user. What it did, rollBack takes back.
func (i *identity) provide(ctx context.Context) error {
	for _, step := range []func(context.Context) error{i.makeNamespace, i.enter, i.makeAccount, i.makeBinding} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// isOurs says whether a registration made obj.
func isOurs(obj metav1.Object) bool { return obj.GetLabels()[AnnotationMemberIdentity] == "true" }

// hasRole says whether there is a ClusterRole that is ours.
func (i *identity) hasRole() bool { return i.role != nil && isOurs(i.role) }

// ours is the metadata of an object of the identity. What is made after the ClusterRole goes with it.
func (i *identity) ours(namespace, name string) metav1.ObjectMeta {
	meta := named(namespace, name)
	meta.Labels = map[string]string{AnnotationMemberIdentity: "true"}
	meta.Annotations = map[string]string{attemptAnnotation: i.attempt}
	if i.hasRole() {
		meta.OwnerReferences = []metav1.OwnerReference{
			{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: i.role.Name, UID: i.role.UID},
		}
	}
	return meta
}

func (i *identity) makeNamespace(ctx context.Context) error {
	namespaces, name := i.member.CoreV1().Namespaces(), i.account.Namespace
	err := wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, memberWait, true, func(ctx context.Context) (bool, error) {
		live, err := namespaces.Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			return live.DeletionTimestamp.IsZero(), nil
		}
		if apierrors.IsNotFound(err) {
			// Noted before the request, since a request that was cut off may have done its work.
			i.undo = append(i.undo, i.takeBackNamespace)
			_, err = namespaces.Create(ctx, &corev1.Namespace{ObjectMeta: i.ours("", name)}, metav1.CreateOptions{FieldManager: kube.FieldManager})
		}
		return err == nil, err
	})
	if wait.Interrupted(err) && ctx.Err() == nil {
		err = fmt.Errorf("it is still being deleted after %s", memberWait)
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create namespace %s on the cluster: %w", name, err)
	}
	return nil
}

// enter makes the ClusterRole, or repairs the one that is ours, and notes the user in it. One that is not ours stays as
// it is.
func (i *identity) enter(ctx context.Context) error {
	roles, before := i.member.RbacV1().ClusterRoles(), ""
	takeBack := func(ctx context.Context) error { return i.takeBackUser(ctx, before) }
	err := kube.RetryOn(ctx, kube.IsStaleWrite, func() error {
		live, err := roles.Get(ctx, memberIdentityName, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			live = &rbacv1.ClusterRole{ObjectMeta: i.ours("", memberIdentityName), Rules: allRules()}
			live.Annotations[i.userKey], before = i.user, ""
			i.undo = append(i.undo, takeBack)
			i.role, err = roles.Create(ctx, live, metav1.CreateOptions{FieldManager: kube.FieldManager})
			return err
		case err != nil:
			return err
		case !isOurs(live):
			i.role = live
			return nil
		}
		if live.Annotations == nil {
			live.Annotations = map[string]string{}
		}
		before = live.Annotations[i.userKey]
		live.Annotations[i.userKey], live.Rules = i.user, allRules()
		i.undo = append(i.undo, takeBack)
		i.role, err = roles.Update(ctx, live, metav1.UpdateOptions{FieldManager: kube.FieldManager})
		return err
	})
	if err != nil {
		return fmt.Errorf("write ClusterRole %s on the cluster: %w", memberIdentityName, err)
	}
	return nil
}

func allRules() []rbacv1.PolicyRule {
	all := []string{rbacv1.APIGroupAll}
	return []rbacv1.PolicyRule{{APIGroups: all, Resources: all, Verbs: all}, {NonResourceURLs: all, Verbs: all}}
}

// errForeignIdentity says that making a part of the identity would mix it with someone else's.
var errForeignIdentity = errors.New("does not exist, while ClusterRole " + memberIdentityName +
	" on the cluster does and was not made by a registration: delete that one, or register with --kubeconfig")

func (i *identity) makeAccount(ctx context.Context) error {
	accounts := i.member.CoreV1().ServiceAccounts(i.account.Namespace)
	err := kube.RetryOn(ctx, kube.IsStaleWrite, func() error {
		desired := &corev1.ServiceAccount{ObjectMeta: i.ours(i.account.Namespace, i.account.Name)}
		live, err := accounts.Get(ctx, i.account.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err) && !i.hasRole():
			return fmt.Errorf("it %w", errForeignIdentity)
		case apierrors.IsNotFound(err):
			_, err = accounts.Create(ctx, desired, metav1.CreateOptions{FieldManager: kube.FieldManager})
			return err
		case err != nil || !isOurs(live) || !i.hasRole():
			return err
		}
		live.OwnerReferences = desired.OwnerReferences
		_, err = accounts.Update(ctx, live, metav1.UpdateOptions{FieldManager: kube.FieldManager})
		return err
	})
	if err != nil {
		return fmt.Errorf("write ServiceAccount %s on the cluster: %w", i.account, err)
	}
	return nil
}

// bindingName is the ClusterRoleBinding's name. A colon is in no name of a namespace or an account, so that no two
// share a name.
func (i *identity) bindingName() string {
	if i.account.Namespace == kube.AgentNamespace && i.account.Name == memberIdentityName {
		return memberIdentityName
	}
	return memberIdentityName + ":" + i.account.Namespace + ":" + i.account.Name
}

func (i *identity) makeBinding(ctx context.Context) error {
	bindings, name := i.member.RbacV1().ClusterRoleBindings(), i.bindingName()
	err := kube.RetryOn(ctx, kube.IsStaleWrite, func() error {
		desired := &rbacv1.ClusterRoleBinding{
			ObjectMeta: i.ours("", name),
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: memberIdentityName},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: i.account.Namespace, Name: i.account.Name}},
		}
		live, err := bindings.Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err) && !i.hasRole():
			return fmt.Errorf("it %w", errForeignIdentity)
		case apierrors.IsNotFound(err):
			_, err = bindings.Create(ctx, desired, metav1.CreateOptions{FieldManager: kube.FieldManager})
			return err
		case err != nil || !isOurs(live) || !i.hasRole():
			return err
		}
		live.OwnerReferences, live.Subjects = desired.OwnerReferences, desired.Subjects
		_, err = bindings.Update(ctx, live, metav1.UpdateOptions{FieldManager: kube.FieldManager})
		return err
	})
	if err != nil {
		return fmt.Errorf("write ClusterRoleBinding %s on the cluster: %w", name, err)
	}
	return nil
}

// RetractMember takes the registration of cluster out of the identity on its member: with the last user the identity
// goes, unless it was there before the first registration; the namespace stays. member may be that very identity:
// whatever is done, it is done by one last request, after which the member's garbage collector goes on. A cluster whose
// registration made no identity is left alone. It can be run again: a member that no longer knows the identity is done.
func RetractMember(ctx context.Context, member *rest.Config, hubUID string, cluster *libv1beta1.SveltosCluster) error {
	if !hasIdentity(cluster) {
		return nil
	}
	i, err := registeredIdentity(member, hubUID, client.ObjectKeyFromObject(cluster))
	if err != nil {
		return err
	}
	err = i.retract(ctx)
	if err == nil {
		return nil
	}
	gone, asked := i.gone(ctx, err, member)
	if gone {
		return nil
	}
	return fmt.Errorf("take back the identity on the cluster: %w", errors.Join(err, asked))
}

// gone says whether failure means that an earlier run took the identity back, by which member itself is known: its
// token is refused though it has not expired, or it has lost its rights. Whoever has them and is refused is refused for
// another reason.
func (i *identity) gone(ctx context.Context, failure error, member *rest.Config) (bool, error) {
	refused := func(err error) bool {
		own := readToken(member.BearerToken)
		return apierrors.IsUnauthorized(err) && member.BearerToken != "" && (own.expires.IsZero() || time.Now().Before(own.expires))
	}
	if !apierrors.IsForbidden(failure) {
		return refused(failure), nil
	}
	for _, verb := range []string{"get", "update", "delete"} {
		review, err := i.member.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
			Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
				Verb: verb, Group: rbacv1.GroupName, Resource: "clusterroles", Name: memberIdentityName,
			}},
		}, metav1.CreateOptions{})
		if err != nil {
			return refused(err), fmt.Errorf("ask the cluster for the identity's rights: %w", err)
		}
		if review.Status.Allowed {
			return false, nil
		}
	}
	return true, nil
}

func (i *identity) retract(ctx context.Context) error {
	last, err := i.leave(ctx, func(annotations map[string]string) bool {
		delete(annotations, i.userKey)
		return true
	})
	if err != nil || last != nil {
		return err
	}
	// Others go on using the identity. This may be the token in use, hence it goes last.
	return i.dropTokenSecret(ctx, i.registrationSecret())
}

// leave changes the users of a ClusterRole that is ours, if change says that there is a change, and deletes it if none
// is left. It returns the one that it deleted, or nil.
func (i *identity) leave(ctx context.Context, change func(annotations map[string]string) bool) (last *rbacv1.ClusterRole, err error) {
	roles := i.member.RbacV1().ClusterRoles()
	err = kube.RetryOnConflict(ctx, func() error {
		live, err := roles.Get(ctx, memberIdentityName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil || !isOurs(live) || !change(live.Annotations) {
			return err
		}
		for key := range live.Annotations {
			if strings.HasPrefix(key, memberUserPrefix) {
				_, err = roles.Update(ctx, live, metav1.UpdateOptions{FieldManager: kube.FieldManager})
				return err
			}
		}
		// A user who comes in between makes this a conflict.
		err = roles.Delete(ctx, live.Name, deleteAsRead(live))
		if err == nil {
			last = live
		}
		return client.IgnoreNotFound(err)
	})
	if err != nil {
		return nil, fmt.Errorf("leave ClusterRole %s on the cluster: %w", memberIdentityName, err)
	}
	return last, nil
}

// deleteAsRead deletes an object only if nobody changed it since obj was read; what it owns goes in the background.
func deleteAsRead(obj metav1.Object) metav1.DeleteOptions {
	uid, version, background := obj.GetUID(), obj.GetResourceVersion(), metav1.DeletePropagationBackground
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &version}, PropagationPolicy: &background}
}
