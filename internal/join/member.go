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

// AnnotationMemberIdentity is "true" on a SveltosCluster if the hub uses a memberIdentity for the cluster. On the
// member, the label with the same name marks the objects of the identity that registrations created.
const AnnotationMemberIdentity = "towline.dev/member-identity"

const (
	// memberIdentityName is the name of the ServiceAccount, the ClusterRole and the ClusterRoleBinding in Sveltos.
	memberIdentityName = "projectsveltos"
	// memberUserPrefix is the prefix of the annotations, on the ClusterRole, that name the users of the identity.
	memberUserPrefix = "registration.towline.dev/"
	// memberTimeout limits the wait for the member's token controller.
	memberTimeout = 10 * time.Second
)

// memberIdentity is the identity of hubs on a member: a ServiceAccount with all permissions. All registrations of the
// member share the identity. Each registration is a user of it, with an annotation on the ClusterRole. The ClusterRole
// owns the other objects, so that its deletion deletes them all. Objects without the label AnnotationMemberIdentity are
// used, and never changed.
type memberIdentity struct {
	member    client.Client
	resources foreign.Resources
	// account is the key of the ServiceAccount.
	account client.ObjectKey
	// userKey and user are the key and the value of the annotation of this user.
	userKey, user string
	writer        *rollback.Writer
	// role is the ClusterRole. addUser sets it.
	role *rbacv1.ClusterRole
}

// ClusterUID returns the uid of a cluster's kube-system namespace, which identifies the cluster.
func ClusterUID(ctx context.Context, cluster client.Reader) (string, error) {
	namespace := &corev1.Namespace{}
	if err := cluster.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, namespace); err != nil {
		return "", fmt.Errorf("read namespace %s: %w", metav1.NamespaceSystem, err)
	}
	return string(namespace.UID), nil
}

// newMemberIdentity returns the identity with this ServiceAccount. The caller must call setCluster or setUser next.
func newMemberIdentity(member *rest.Config, account client.ObjectKey) (*memberIdentity, error) {
	memberClient, resources, err := NewClient(member, 0)
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	return &memberIdentity{
		member: memberClient, resources: resources, account: account, writer: rollback.New(memberClient, string(uuid.NewUUID())),
	}, nil
}

// setCluster sets the user of i: the registration of a SveltosCluster on a hub.
func (i *memberIdentity) setCluster(hubUID string, cluster client.ObjectKey) {
	i.setUser(shortHash(hubUID+"/"+cluster.String()), fmt.Sprintf("cluster %s of hub %s", cluster, hubUID))
}

func (i *memberIdentity) setUser(key, user string) {
	i.userKey, i.user = memberUserPrefix+key, user+", attempt "+i.writer.Attempt()
}

// shortHash returns a hash of text with 20 characters, for use in a name.
func shortHash(text string) string {
	const length = 20
	sum := sha256.Sum256([]byte(text))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:length]
}

// ensure creates or repairs the objects of the identity, and adds its user.
func (i *memberIdentity) ensure(ctx context.Context) error {
	namespace := &corev1.Namespace{ObjectMeta: i.metadata("", i.account.Namespace)}
	if err := ensureNamespaceWithRollback(ctx, i.member, i.writer, i.resources, namespace); err != nil {
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

// hasIdentityLabel returns whether a registration created the object.
func hasIdentityLabel(o metav1.Object) bool { return o.GetLabels()[AnnotationMemberIdentity] == "true" }

// ClusterRoleOwner returns an owner reference to role.
func ClusterRoleOwner(role client.Object) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: role.GetName(), UID: role.GetUID()}
}

// metadata returns the metadata of an object of the identity. After addUser, the ClusterRole is its owner.
func (i *memberIdentity) metadata(namespace, name string) metav1.ObjectMeta {
	meta := objectMeta(namespace, name)
	meta.Labels = map[string]string{AnnotationMemberIdentity: "true"}
	if i.role != nil && hasIdentityLabel(i.role) {
		meta.OwnerReferences = []metav1.OwnerReference{ClusterRoleOwner(i.role)}
	}
	return meta
}

// addUser creates or repairs the ClusterRole, and adds the user to it. It does not change a ClusterRole that another
// party created.
func (i *memberIdentity) addUser(ctx context.Context) error {
	before := ""
	rollBack := func(ctx context.Context) error { return i.rollBackUser(ctx, before) }
	return kube.RetryOn(ctx, kube.IsStaleWrite, func() error {
		live := &rbacv1.ClusterRole{}
		found, err := read(ctx, i.member, live, client.ObjectKey{Name: memberIdentityName})
		if err != nil {
			return err
		}
		if i.role = live; found && !hasIdentityLabel(live) {
			return nil
		}
		if !found {
			live.ObjectMeta = i.metadata("", memberIdentityName)
		}
		before = live.Annotations[i.userKey]
		metav1.SetMetaDataAnnotation(&live.ObjectMeta, i.userKey, i.user)
		all := []string{rbacv1.APIGroupAll}
		live.Rules = []rbacv1.PolicyRule{{APIGroups: all, Resources: all, Verbs: all}, {NonResourceURLs: all, Verbs: all}}
		i.writer.AddUndo(rollBack)
		if found {
			return i.member.Update(ctx, live, client.FieldOwner(kube.FieldManager))
		}
		return i.member.Create(ctx, live, client.FieldOwner(kube.FieldManager))
	})
}

// errForeignIdentity is returned if another party created the ClusterRole, and another object of the identity does not
// exist.
var errForeignIdentity = errors.New("does not exist, while ClusterRole " + memberIdentityName +
	" on the cluster does and was not made by a registration: delete that one, or register with --kubeconfig")

// apply creates or repairs obj. If another party created obj or the ClusterRole, it changes nothing.
func (i *memberIdentity) apply(ctx context.Context, obj client.Object) error {
	if !hasIdentityLabel(i.role) {
		found, err := read(ctx, i.member, obj, client.ObjectKeyFromObject(obj))
		if err == nil && !found {
			err = fmt.Errorf("write %s on the cluster: it %w", kube.RefIn(i.member.Scheme(), obj), errForeignIdentity)
		}
		return err
	}
	_, _, err := i.writer.Apply(ctx, obj, func(live *unstructured.Unstructured) error {
		if !hasIdentityLabel(live) {
			return ErrForeign
		}
		return nil
	})
	if err != nil && !errors.Is(err, ErrForeign) {
		return fmt.Errorf("create the identity on the cluster: %w", err)
	}
	return nil
}

// bindingName returns the name of the ClusterRoleBinding. It is unique, since names of namespaces and accounts have no
// colon.
func (i *memberIdentity) bindingName() string {
	if i.account.Namespace == kube.AgentNamespace && i.account.Name == memberIdentityName {
		return memberIdentityName
	}
	return memberIdentityName + ":" + i.account.Namespace + ":" + i.account.Name
}

// DeleteMemberObjects removes the registration of cluster from the users of the identity on its member. If no user is
// left, it deletes the identity, but not the namespace and objects that another party created. member may have the
// credentials of the identity: the last request deletes the ClusterRole, and the garbage collector deletes the rest. It
// ignores a cluster without AnnotationMemberIdentity. It can be called again after it has deleted its credentials.
func DeleteMemberObjects(ctx context.Context, member *rest.Config, hubUID string, cluster *libv1beta1.SveltosCluster) error {
	if !hasMemberIdentity(cluster) {
		return nil
	}
	i, err := newMemberIdentity(member, client.ObjectKey{Namespace: kube.AgentNamespace, Name: memberIdentityName})
	if err != nil {
		return err
	}
	i.setCluster(hubUID, client.ObjectKeyFromObject(cluster))
	err = i.removeUser(ctx)
	// An earlier call has deleted the identity if its permissions are lost, or its token is rejected before it expires.
	token := ReadToken(member.BearerToken)
	isRejected := apierrors.IsUnauthorized(err) && token.Text != "" && (token.Expires.IsZero() || time.Now().Before(token.Expires))
	if err == nil || isRejected || apierrors.IsForbidden(err) && !i.canReadRole(ctx) {
		return nil
	}
	return fmt.Errorf("take back the identity on the cluster: %w", err)
}

// canReadRole distinguishes lost permissions from an admission policy, which also answers a write with Forbidden.
func (i *memberIdentity) canReadRole(ctx context.Context) bool {
	return !apierrors.IsForbidden(i.member.Get(ctx, client.ObjectKey{Name: memberIdentityName}, &rbacv1.ClusterRole{}))
}

// removeUser removes the user from the ClusterRole, and deletes its token Secret. It leaves that Secret to the garbage
// collector if it deletes the ClusterRole, which owns the Secret.
func (i *memberIdentity) removeUser(ctx context.Context) error {
	isLast, err := i.changeUsers(ctx, func(annotations map[string]string) bool {
		delete(annotations, i.userKey)
		return true
	})
	if err != nil || isLast {
		return err
	}
	// The Secret is deleted last, since the requests may use its token.
	return i.deleteTokenSecret(ctx)
}

// rollBackUser removes the user that this run added, or restores its annotation to before.
func (i *memberIdentity) rollBackUser(ctx context.Context, before string) error {
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

// changeUsers calls change with the annotations of the ClusterRole. If change returns true, changeUsers writes them, or
// deletes the ClusterRole if it has no users. It does nothing for a ClusterRole that another party created.
func (i *memberIdentity) changeUsers(ctx context.Context, change func(annotations map[string]string) bool) (isDeleted bool, err error) {
	err = kube.RetryOnConflict(ctx, func() error {
		live := &rbacv1.ClusterRole{}
		found, err := read(ctx, i.member, live, client.ObjectKey{Name: memberIdentityName})
		if err != nil || !found || !hasIdentityLabel(live) || !change(live.Annotations) {
			return err
		}
		for key := range live.Annotations {
			if strings.HasPrefix(key, memberUserPrefix) {
				return i.member.Update(ctx, live, client.FieldOwner(kube.FieldManager))
			}
		}
		// A user that is added since the read makes this a conflict.
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

// tokenSecretName returns the name of the token Secret of this registration. Each registration has its own.
func (i *memberIdentity) tokenSecretName() string {
	return memberIdentityName + "-" + i.userKey[len(memberUserPrefix):]
}

// ensureKubeconfig creates or repairs the identity, and returns a kubeconfig for it after its access was checked.
func (i *memberIdentity) ensureKubeconfig(ctx context.Context, request PushRequest) ([]byte, error) {
	if err := i.ensure(ctx); err != nil {
		return nil, err
	}
	secret := ""
	if request.ServiceAccountToken {
		secret = i.tokenSecretName()
	}
	kubeconfig, err := i.kubeconfig(ctx, request.Member, secret, MemberTokenLife)
	if err != nil {
		return nil, err
	}
	return kubeconfig, awaitAccess(ctx, kubeconfig)
}

// kubeconfig returns a kubeconfig for the cluster of config. Its token is from the Secret with the name secret, see
// tokenFromSecret. If secret is "", it requests a token; if life is 0, the member decides the life.
func (i *memberIdentity) kubeconfig(ctx context.Context, config *rest.Config, secret string, life time.Duration) ([]byte, error) {
	cluster, err := clusterEntry(config)
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

// tokenFromSecret returns a token that does not expire, from the Secret with this name. If the Secret does not exist,
// it creates the Secret, and waits until the token controller has written the token.
func (i *memberIdentity) tokenFromSecret(ctx context.Context, name string) (string, error) {
	key, live := client.ObjectKey{Namespace: i.account.Namespace, Name: name}, &corev1.Secret{}
	found, err := read(ctx, i.member, live, key)
	if err == nil && !found {
		desired := &corev1.Secret{ObjectMeta: i.metadata(key.Namespace, key.Name), Type: corev1.SecretTypeServiceAccountToken}
		desired.Annotations = map[string]string{corev1.ServiceAccountNameKey: i.account.Name}
		_, _, err = i.writer.Apply(ctx, desired, nil)
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

func (i *memberIdentity) deleteTokenSecret(ctx context.Context) error {
	live := &corev1.Secret{}
	found, err := read(ctx, i.member, live, client.ObjectKey{Namespace: i.account.Namespace, Name: i.tokenSecretName()})
	if err != nil || !found || !hasIdentityLabel(live) {
		return err
	}
	if err := deleteObject(ctx, i.member, live); err != nil {
		return fmt.Errorf("on the cluster: %w", err)
	}
	return nil
}
