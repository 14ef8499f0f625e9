package join

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

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
	var issued token
	if secret != "" {
		issued.text, err = i.tokenFromSecret(ctx, secret)
	} else {
		issued, err = requestToken(ctx, i.member, i.account, life, nil)
	}
	if err != nil {
		return nil, err
	}
	kubeconfig, err := clientcmd.Write(*tokenKubeconfig(cluster, i.account.Name, issued.text, i.account.Namespace))
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
