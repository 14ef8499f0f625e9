package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// registrationSecret is the name of the Secret with the token of this registration alone, so that it can go with the
// registration.
func (i *identity) registrationSecret() string {
	return memberIdentityName + "-" + i.userKey[len(memberUserPrefix):]
}

// registrationToken gets the token that the hub begins with.
func (i *identity) registrationToken(ctx context.Context, r PushRequest) (string, error) {
	if r.ServiceAccountToken {
		return i.tokenFromSecret(ctx, i.registrationSecret())
	}
	return i.requestToken(ctx, MemberTokenLife)
}

// requestToken asks for a token of the account; zero leaves its life to the cluster.
func (i *identity) requestToken(ctx context.Context, life time.Duration) (string, error) {
	request := &authenticationv1.TokenRequest{}
	if life > 0 {
		request.Spec.ExpirationSeconds = ptr.To(int64(life / time.Second))
	}
	answer, err := i.member.CoreV1().ServiceAccounts(i.account.Namespace).CreateToken(ctx, i.account.Name, request, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("request a token for ServiceAccount %s: %w", i.account, err)
	}
	return answer.Status.Token, nil
}

// tokenFromSecret makes a Secret that Kubernetes fills with a token of the account, one that does not expire, and waits
// for it. The Secret goes with the account or the ClusterRole. One that is there already is used.
func (i *identity) tokenFromSecret(ctx context.Context, name string) (string, error) {
	secrets := i.member.CoreV1().Secrets(i.account.Namespace)
	i.undo = append(i.undo, func(ctx context.Context) error { return i.takeBackSecret(ctx, name) })
	desired := &corev1.Secret{ObjectMeta: i.ours(i.account.Namespace, name), Type: corev1.SecretTypeServiceAccountToken}
	desired.Annotations[corev1.ServiceAccountNameKey] = i.account.Name
	_, err := secrets.Create(ctx, desired, metav1.CreateOptions{FieldManager: kube.FieldManager})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return "", fmt.Errorf("create Secret %s/%s on the cluster: %w", i.account.Namespace, name, err)
	}
	var text []byte
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, memberWait, true, func(ctx context.Context) (bool, error) {
		live, err := secrets.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		if live.Type != corev1.SecretTypeServiceAccountToken || live.Annotations[corev1.ServiceAccountNameKey] != i.account.Name {
			return false, fmt.Errorf("it exists and holds no token of ServiceAccount %s", i.account)
		}
		text = live.Data[corev1.ServiceAccountTokenKey]
		return len(text) > 0, nil
	})
	if wait.Interrupted(err) && ctx.Err() == nil {
		err = fmt.Errorf("the cluster put no token into it within %s", memberWait)
	}
	if err != nil {
		return "", fmt.Errorf("wait for the token in Secret %s/%s: %w", i.account.Namespace, name, err)
	}
	return string(text), nil
}

// dropTokenSecret deletes a Secret with a token if it is ours.
func (i *identity) dropTokenSecret(ctx context.Context, name string) error {
	return i.deleteSecret(ctx, name, func(secret *corev1.Secret) bool { return isOurs(secret) })
}

func (i *identity) takeBackSecret(ctx context.Context, name string) error {
	return i.deleteSecret(ctx, name, func(secret *corev1.Secret) bool { return secret.Annotations[attemptAnnotation] == i.attempt })
}

func (i *identity) deleteSecret(ctx context.Context, name string, mine func(*corev1.Secret) bool) error {
	secrets := i.member.CoreV1().Secrets(i.account.Namespace)
	live, err := secrets.Get(ctx, name, metav1.GetOptions{})
	if err == nil && mine(live) {
		err = secrets.Delete(ctx, name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(live.UID))})
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete Secret %s/%s on the cluster: %w", i.account.Namespace, name, err)
	}
	return nil
}

// rollBack takes back what this run made on the member, newest first. It also works after ctx was cancelled.
func (i *identity) rollBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	var errs []error
	for n := len(i.undo) - 1; n >= 0; n-- {
		errs = append(errs, i.undo[n](ctx))
	}
	return errors.Join(errs...)
}

// takeBackUser takes the user out again, unless another run has entered the same one since; before is what was noted
// before this run. If it was the only one, the identity goes.
func (i *identity) takeBackUser(ctx context.Context, before string) error {
	last, err := i.leave(ctx, func(annotations map[string]string) bool {
		if annotations[i.userKey] != i.user {
			return false
		}
		delete(annotations, i.userKey)
		if before != "" {
			annotations[i.userKey] = before
		}
		return true
	})
	if err != nil || last == nil {
		return err
	}
	// The garbage collector would do the same, later.
	return errors.Join(i.takeBackBinding(ctx, last), i.takeBackAccount(ctx, last))
}

// belongs says whether obj is owned by owner.
func belongs(obj, owner metav1.Object) bool {
	references := obj.GetOwnerReferences()
	return len(references) == 1 && references[0].UID == owner.GetUID()
}

func (i *identity) takeBackBinding(ctx context.Context, owner metav1.Object) error {
	bindings := i.member.RbacV1().ClusterRoleBindings()
	live, err := bindings.Get(ctx, i.bindingName(), metav1.GetOptions{})
	if err == nil && belongs(live, owner) {
		err = bindings.Delete(ctx, live.Name, deleteAsRead(live))
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take back ClusterRoleBinding %s on the cluster: %w", i.bindingName(), err)
	}
	return nil
}

func (i *identity) takeBackAccount(ctx context.Context, owner metav1.Object) error {
	accounts := i.member.CoreV1().ServiceAccounts(i.account.Namespace)
	live, err := accounts.Get(ctx, i.account.Name, metav1.GetOptions{})
	if err == nil && belongs(live, owner) {
		err = accounts.Delete(ctx, live.Name, deleteAsRead(live))
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take back ServiceAccount %s on the cluster: %w", i.account, err)
	}
	return nil
}

// takeBackNamespace deletes the namespace if this run made it and nobody else has moved in.
func (i *identity) takeBackNamespace(ctx context.Context) error {
	namespaces := i.member.CoreV1().Namespaces()
	live, err := namespaces.Get(ctx, i.account.Namespace, metav1.GetOptions{})
	if err == nil && live.Annotations[attemptAnnotation] == i.attempt {
		var empty bool
		if empty, err = i.namespaceIsEmpty(ctx); err == nil && empty {
			err = namespaces.Delete(ctx, live.Name, deleteAsRead(live))
		}
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take back namespace %s on the cluster: %w", i.account.Namespace, err)
	}
	return nil
}

// namespaceIsEmpty says whether nobody works in the namespace: who does has an account or a Secret there, or a
// ConfigMap beside the one that Kubernetes puts into every namespace.
func (i *identity) namespaceIsEmpty(ctx context.Context) (bool, error) {
	core, name := i.member.CoreV1(), i.account.Namespace
	accounts, err := core.ServiceAccounts(name).List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, err
	}
	secrets, err := core.Secrets(name).List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, err
	}
	configMaps, err := core.ConfigMaps(name).List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, err
	}
	for _, account := range accounts.Items {
		if account.Name != "default" {
			return false, nil
		}
	}
	for _, configMap := range configMaps.Items {
		if configMap.Name != "kube-root-ca.crt" {
			return false, nil
		}
	}
	return len(secrets.Items) == 0, nil
}
