package join

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

// AnnotationMemberIdentity is "true" on a SveltosCluster whose registration created, or uses, an identity on the member
// for the hub. On the member, the label of the same name marks the objects of that identity which registrations
// created.
const AnnotationMemberIdentity = "towline.dev/member-identity"

const (
	// memberIdentityName is the name of the ServiceAccount, the ClusterRole and the ClusterRoleBinding in Sveltos.
	memberIdentityName = "projectsveltos"
	// memberUserPrefix is the prefix of the annotations of the ClusterRole with the users of the identity, one for each
	// registration.
	memberUserPrefix = "registration.towline.dev/"
	// memberTimeout limits the waits for the member's own controllers.
	memberTimeout = 10 * time.Second
)

// identity gives the hubs access to a member: a ServiceAccount which may do everything. All registrations share it. The
// annotations of the ClusterRole list its users, and the ClusterRole owns the other objects. The label
// AnnotationMemberIdentity marks the objects that registrations created; others are used as they are.
type identity struct {
	member    client.Client
	resources foreign.Resources
	// account is the ServiceAccount.
	account client.ObjectKey
	// userKey and user are the annotation for this user.
	userKey string
	user    string
	log     *rollback.Log
	// role is the ClusterRole once addUser has returned.
	role *rbacv1.ClusterRole
}

// HubUID returns the uid of the hub's kube-system namespace, which identifies the hub.
func HubUID(ctx context.Context, hub client.Reader) (string, error) {
	namespace := &corev1.Namespace{}
	if err := hub.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, namespace); err != nil {
		return "", fmt.Errorf("read namespace %s: %w", metav1.NamespaceSystem, err)
	}
	return string(namespace.UID), nil
}

// newIdentity returns the identity with this ServiceAccount. setCluster or setUser must be called before its methods.
func newIdentity(member *rest.Config, account client.ObjectKey) (*identity, error) {
	memberClient, resources, err := NewClient(member, 0)
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	return &identity{
		member: memberClient, resources: resources, account: account, log: rollback.New(memberClient, string(uuid.NewUUID())),
	}, nil
}

// setCluster makes the registration of a SveltosCluster on a hub the user.
func (i *identity) setCluster(hubUID string, cluster client.ObjectKey) {
	i.setUser(shortHash(hubUID+"/"+cluster.String()), fmt.Sprintf("cluster %s of hub %s", cluster, hubUID))
}

func (i *identity) setUser(key, user string) {
	i.userKey, i.user = memberUserPrefix+key, user+", attempt "+i.log.Attempt()
}

// shortHash returns 20 characters that stand for text in a name.
func shortHash(text string) string {
	const length = 20
	sum := sha256.Sum256([]byte(text))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:length]
}

// ensure creates or repairs the identity, and adds its user.
func (i *identity) ensure(ctx context.Context) error {
	namespace := &corev1.Namespace{ObjectMeta: i.metadata("", i.account.Namespace)}
	if err := ensureNamespace(ctx, i.member, i.log, i.resources, namespace); err != nil {
		return fmt.Errorf("on the cluster: %w", err)
	}
	if err := i.addUser(ctx); err != nil {
		return fmt.Errorf("write ClusterRole %s on the cluster: %w", memberIdentityName, err)
	}
	if err := i.apply(ctx, &corev1.ServiceAccount{ObjectMeta: i.metadata(i.account.Namespace, i.account.Name)}); err != nil {
		return err
	}
	return i.apply(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: i.metadata("", i.bindingName()),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: memberIdentityName},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: i.account.Namespace, Name: i.account.Name}},
	})
}

// isOwn returns whether a registration created obj.
func isOwn(obj metav1.Object) bool { return obj.GetLabels()[AnnotationMemberIdentity] == "true" }

// OwnedBy returns the reference of an object to the ClusterRole that owns it.
func OwnedBy(role client.Object) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: role.GetName(), UID: role.GetUID()}
}

// metadata is the metadata of an object of the identity. Objects that are created after the ClusterRole belong to it.
func (i *identity) metadata(namespace, name string) metav1.ObjectMeta {
	meta := named(namespace, name)
	meta.Labels = map[string]string{AnnotationMemberIdentity: "true"}
	if i.role != nil && isOwn(i.role) {
		meta.OwnerReferences = []metav1.OwnerReference{OwnedBy(i.role)}
	}
	return meta
}

// addUser creates the ClusterRole, or repairs the one that a registration created, and adds the user to it. A
// ClusterRole of another party stays as it is.
func (i *identity) addUser(ctx context.Context) error {
	before := ""
	rollBack := func(ctx context.Context) error { return i.rollBackUser(ctx, before) }
	return kube.RetryOn(ctx, kube.IsStaleWrite, func() error {
		live := &rbacv1.ClusterRole{}
		found, err := read(ctx, i.member, live, client.ObjectKey{Name: memberIdentityName})
		if err != nil {
			return err
		}
		if i.role = live; found && !isOwn(live) {
			return nil
		}
		if !found {
			live.ObjectMeta = i.metadata("", memberIdentityName)
		}
		before = live.Annotations[i.userKey]
		metav1.SetMetaDataAnnotation(&live.ObjectMeta, i.userKey, i.user)
		all := []string{rbacv1.APIGroupAll}
		live.Rules = []rbacv1.PolicyRule{{APIGroups: all, Resources: all, Verbs: all}, {NonResourceURLs: all, Verbs: all}}
		i.log.Add(rollBack)
		if found {
			return i.member.Update(ctx, live, client.FieldOwner(kube.FieldManager))
		}
		return i.member.Create(ctx, live, client.FieldOwner(kube.FieldManager))
	})
}

// errForeignIdentity is returned if the ClusterRole belongs to another party, and another object of the identity is
// missing: creating it would mix both.
var errForeignIdentity = errors.New("does not exist, while ClusterRole " + memberIdentityName +
	" on the cluster does and was not made by a registration: delete that one, or register with --kubeconfig")

// apply creates obj, or repairs the one that a registration created. It does not change one of another party.
func (i *identity) apply(ctx context.Context, obj client.Object) error {
	if !isOwn(i.role) {
		found, err := read(ctx, i.member, obj, client.ObjectKeyFromObject(obj))
		if err == nil && !found {
			err = fmt.Errorf("write %s on the cluster: it %w", kube.RefIn(i.member.Scheme(), obj), errForeignIdentity)
		}
		return err
	}
	_, _, err := i.log.Apply(ctx, obj, func(live *unstructured.Unstructured) error {
		if !isOwn(live) {
			return ErrForeign
		}
		return nil
	})
	if err != nil && !errors.Is(err, ErrForeign) {
		return fmt.Errorf("create the identity on the cluster: %w", err)
	}
	return nil
}

// bindingName is the name of the ClusterRoleBinding. Names of namespaces and accounts have no colon, so that it is
// unambiguous.
func (i *identity) bindingName() string {
	if i.account.Namespace == kube.AgentNamespace && i.account.Name == memberIdentityName {
		return memberIdentityName
	}
	return memberIdentityName + ":" + i.account.Namespace + ":" + i.account.Name
}

// RetractMember removes the registration of cluster from the users of the identity on its member. With the last user
// the identity is deleted, unless it existed before the first registration; the namespace stays. member may have the
// credentials of that identity: one last request deletes the ClusterRole, and the member's garbage collector deletes
// the rest. A cluster whose registration created no identity is ignored. RetractMember can be called again, even if
// the first call has deleted the credentials of member.
func RetractMember(ctx context.Context, member *rest.Config, hubUID string, cluster *libv1beta1.SveltosCluster) error {
	if !hasIdentity(cluster) {
		return nil
	}
	i, err := newIdentity(member, client.ObjectKey{Namespace: kube.AgentNamespace, Name: memberIdentityName})
	if err != nil {
		return err
	}
	i.setCluster(hubUID, client.ObjectKeyFromObject(cluster))
	err = i.retract(ctx)
	// An earlier run has deleted the identity if its rights are lost, or its token is refused before it expires.
	own := ReadToken(member.BearerToken)
	isRefused := apierrors.IsUnauthorized(err) && own.Text != "" && (own.Expires.IsZero() || time.Now().Before(own.Expires))
	if err == nil || isRefused || apierrors.IsForbidden(err) && i.hasLostRights(ctx) {
		return nil
	}
	return fmt.Errorf("take back the identity on the cluster: %w", err)
}

// hasLostRights returns whether the identity may no longer read its ClusterRole. A refused write alone can have another
// reason, such as an admission policy.
func (i *identity) hasLostRights(ctx context.Context) bool {
	return apierrors.IsForbidden(i.member.Get(ctx, client.ObjectKey{Name: memberIdentityName}, &rbacv1.ClusterRole{}))
}

func (i *identity) retract(ctx context.Context) error {
	isLast, err := i.changeUsers(ctx, func(annotations map[string]string) bool {
		delete(annotations, i.userKey)
		return true
	})
	if err != nil || isLast {
		return err
	}
	// Other registrations use the identity. The token in this Secret can be the credential of these requests, so it is
	// deleted last.
	return i.deleteTokenSecret(ctx)
}

// rollBackUser removes the user that this run added, or restores the one that there was before.
func (i *identity) rollBackUser(ctx context.Context, before string) error {
	_, err := i.changeUsers(ctx, func(annotations map[string]string) bool {
		if annotations[i.userKey] != i.user {
			return false
		}
		delete(annotations, i.userKey)
		if before != "" {
			annotations[i.userKey] = before
		}
		return true
	})
	return err
}

// changeUsers calls change for the users of a ClusterRole that a registration created. If change returns true, it
// writes them, or deletes the ClusterRole if it has no users any more.
func (i *identity) changeUsers(ctx context.Context, change func(annotations map[string]string) bool) (isDeleted bool, err error) {
	err = kube.RetryOnConflict(ctx, func() error {
		live := &rbacv1.ClusterRole{}
		found, err := read(ctx, i.member, live, client.ObjectKey{Name: memberIdentityName})
		if err != nil || !found || !isOwn(live) || !change(live.Annotations) {
			return err
		}
		for key := range live.Annotations {
			if strings.HasPrefix(key, memberUserPrefix) {
				return i.member.Update(ctx, live, client.FieldOwner(kube.FieldManager))
			}
		}
		// A user who is added meanwhile makes this a conflict.
		unchanged := client.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion}
		err = i.member.Delete(ctx, live, unchanged, client.PropagationPolicy(metav1.DeletePropagationBackground))
		isDeleted = err == nil
		return client.IgnoreNotFound(err)
	})
	if err != nil {
		return false, fmt.Errorf("remove the registration from ClusterRole %s of the cluster: %w", memberIdentityName, err)
	}
	return isDeleted, nil
}

// tokenSecret is the name of the Secret with the token of this registration alone, so that it can be deleted with the
// registration.
func (i *identity) tokenSecret() string {
	return memberIdentityName + "-" + i.userKey[len(memberUserPrefix):]
}

// ensureKubeconfig creates or repairs the identity, and returns a kubeconfig for it that works.
func (i *identity) ensureKubeconfig(ctx context.Context, request PushRequest) ([]byte, error) {
	if err := i.ensure(ctx); err != nil {
		return nil, err
	}
	secret := ""
	if request.ServiceAccountToken {
		secret = i.tokenSecret()
	}
	kubeconfig, err := i.kubeconfig(ctx, request.Member, secret, MemberTokenLife)
	if err != nil {
		return nil, err
	}
	return kubeconfig, awaitAccess(ctx, kubeconfig)
}

// kubeconfig returns a kubeconfig for the cluster that config connects to, with the token of the Secret, see
// tokenFromSecret. Without the name of a Secret, it requests a token; if life is zero, the cluster decides it.
func (i *identity) kubeconfig(ctx context.Context, config *rest.Config, secret string, life time.Duration) ([]byte, error) {
	cluster, err := addressIn(config)
	if err != nil {
		return nil, err
	}
	var issued Token
	if secret != "" {
		issued.Text, err = i.tokenFromSecret(ctx, secret)
	} else {
		issued, err = requestToken(ctx, i.member, i.account, life, nil)
	}
	if err != nil {
		return nil, err
	}
	kubeconfig, err := clientcmd.Write(*tokenKubeconfig(cluster, i.account.Name, issued.Text, i.account.Namespace))
	if err != nil {
		return nil, fmt.Errorf("encode the kubeconfig: %w", err)
	}
	return kubeconfig, nil
}

// tokenFromSecret creates a Secret in which Kubernetes puts a token of the account that does not expire, and waits for
// that. The Secret is deleted with the account or the ClusterRole. An existing Secret is used.
func (i *identity) tokenFromSecret(ctx context.Context, name string) (string, error) {
	key, live := client.ObjectKey{Namespace: i.account.Namespace, Name: name}, &corev1.Secret{}
	found, err := read(ctx, i.member, live, key)
	if err == nil && !found {
		desired := &corev1.Secret{ObjectMeta: i.metadata(key.Namespace, key.Name), Type: corev1.SecretTypeServiceAccountToken}
		desired.Annotations = map[string]string{corev1.ServiceAccountNameKey: i.account.Name}
		_, _, err = i.log.Apply(ctx, desired, nil)
	}
	if err != nil {
		return "", fmt.Errorf("create Secret %s on the cluster: %w", key, err)
	}
	var token []byte
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, memberTimeout, true, func(ctx context.Context) (bool, error) {
		if err := i.member.Get(ctx, key, live); err != nil {
			return false, err
		}
		if live.Type != corev1.SecretTypeServiceAccountToken || live.Annotations[corev1.ServiceAccountNameKey] != i.account.Name {
			return false, fmt.Errorf("it exists and holds no token of ServiceAccount %s", i.account)
		}
		token = live.Data[corev1.ServiceAccountTokenKey]
		return len(token) > 0, nil
	})
	if wait.Interrupted(err) && ctx.Err() == nil {
		err = fmt.Errorf("the cluster put no token into it within %s", memberTimeout)
	}
	if err != nil {
		return "", fmt.Errorf("wait for the token in Secret %s: %w", key, err)
	}
	return string(token), nil
}

// deleteTokenSecret deletes the Secret with the token of this registration.
func (i *identity) deleteTokenSecret(ctx context.Context) error {
	live := &corev1.Secret{}
	found, err := read(ctx, i.member, live, client.ObjectKey{Namespace: i.account.Namespace, Name: i.tokenSecret()})
	if err != nil || !found || !isOwn(live) {
		return err
	}
	if err := deleteObject(ctx, i.member, live); err != nil {
		return fmt.Errorf("on the cluster: %w", err)
	}
	return nil
}
