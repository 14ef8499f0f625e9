package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

const (
	// RenewedKubeconfigKey is the default key of a renewed kubeconfig, as the Sveltos surface has it.
	RenewedKubeconfigKey = "re-kubeconfig"
	// renewAhead is how long before the interval is over a token is renewed, if the interval is longer than that.
	renewAhead = 10 * time.Minute
	// renewGrace is how much longer than the interval a token lives by default.
	renewGrace = 30 * time.Minute
	// minTokenLife is the shortest life that API servers give.
	minTokenLife = 10 * time.Minute
	// renewRetry is the time between attempts to renew.
	renewRetry = time.Minute
)

// serviceAccountUser begins the user name of a ServiceAccount.
const serviceAccountUser = "system:serviceaccount:"

// Renewal keeps the token in a push-mode cluster's kubeconfig fresh, as spec.tokenRequestRenewalOption says.
type Renewal struct {
	// Hub reads and writes the SveltosCluster and its Secret. It must read Secrets from the API server, or hold them in a
	// cache.
	Hub client.Client
	// Member says how the hub reaches the cluster now. Its token tells how long it lives.
	Member func(ctx context.Context, cluster *libv1beta1.SveltosCluster) (*rest.Config, error)
	// Clock tells the time. Default: the real one.
	Clock clock.PassiveClock
}

// Run renews the token if that is due, and returns when to ask next; 0 if the cluster's token is not to be renewed. An
// error means that the present token goes on being used; next is then when to try again. The renewed kubeconfig was
// tried before it is in use, it is in the Secret before the cluster refers to it, and when Run ends anywhere in between
// the present one works on. Run writes spec.kubeconfigKeyName and status.lastReconciledTokenRequestAt itself, and into
// cluster too, of which it changes nothing else.
func (r Renewal) Run(ctx context.Context, cluster *libv1beta1.SveltosCluster) (next time.Duration, err error) {
	option := cluster.Spec.TokenRequestRenewalOption
	if option == nil || cluster.Spec.PullMode || !cluster.DeletionTimestamp.IsZero() {
		return 0, nil
	}
	if option.RenewTokenRequestInterval.Duration <= 0 {
		return 0, errors.New("renew the token: spec.tokenRequestRenewalOption.renewTokenRequestInterval is not positive")
	}
	r.Clock = cmp.Or[clock.PassiveClock](r.Clock, clock.RealClock{})
	config, err := r.Member(ctx, cluster)
	if err != nil {
		return renewRetry, fmt.Errorf("renew the token: %w", err)
	}
	if pause := renewalDue(cluster, readToken(config.BearerToken), r.Clock.Now()).Sub(r.Clock.Now()); pause > 0 {
		return pause, nil
	}
	fresh, err := r.renew(ctx, cluster)
	if err != nil {
		return renewRetry, fmt.Errorf("renew the token: %w", err)
	}
	return max(renewalDue(cluster, fresh, r.Clock.Now()).Sub(r.Clock.Now()), time.Second), nil
}

// renewalDue says when the token of a cluster is to be renewed. An issuer may give a token less life than was asked
// for: such a one is renewed earlier than the interval says. The times in a token are by the member's clock, which may
// be wrong, hence renewals keep a distance from each other in any case. A renewal after now did not take place:
// somebody wrote that.
func renewalDue(cluster *libv1beta1.SveltosCluster, current token, now time.Time) time.Time {
	interval := cluster.Spec.TokenRequestRenewalOption.RenewTokenRequestInterval.Duration
	if interval > renewAhead {
		interval -= renewAhead
	}
	since := cluster.CreationTimestamp.Time
	if !current.issued.IsZero() {
		since = current.issued
	}
	last, err := time.Parse(time.RFC3339, cluster.Status.LastReconciledTokenRequestAt)
	if err != nil || last.After(now) {
		last = time.Time{}
	} else {
		since = last
	}
	due := since.Add(interval)
	if current.expires.IsZero() {
		return due
	}
	early := current.issued.Add(current.untilRenewal(0))
	if soonest := last.Add(current.expires.Sub(current.issued) / 10); early.Before(soonest) {
		early = soonest
	}
	if early.Before(due) {
		return early
	}
	return due
}

// renewedLife is the life to ask for.
func renewedLife(option *libv1beta1.TokenRequestRenewalOption) time.Duration {
	if option.TokenDuration != nil {
		return max(option.TokenDuration.Duration, minTokenLife)
	}
	return max(option.RenewTokenRequestInterval.Duration+renewGrace, minTokenLife)
}

// renew gets a new token and brings it into use.
func (r Renewal) renew(ctx context.Context, cluster *libv1beta1.SveltosCluster) (token, error) {
	// Both are read now and written only as they were read: a cluster that is registered again meanwhile keeps its new
	// kubeconfig.
	live, secret := &libv1beta1.SveltosCluster{}, &corev1.Secret{}
	if err := r.Hub.Get(ctx, client.ObjectKeyFromObject(cluster), live); err != nil {
		return token{}, fmt.Errorf("read the SveltosCluster: %w", err)
	}
	option := live.Spec.TokenRequestRenewalOption
	if live.UID != cluster.UID || option == nil {
		return token{}, errors.New("the cluster has changed meanwhile")
	}
	name := cmp.Or(live.Spec.KubeconfigName, KubeconfigSecret(live.Name))
	if err := r.Hub.Get(ctx, client.ObjectKey{Namespace: live.Namespace, Name: name}, secret); err != nil {
		return token{}, fmt.Errorf("read the kubeconfig: %w", err)
	}
	used := live.Spec.KubeconfigKeyName
	if used == "" && len(secret.Data) > 0 {
		used = slices.Min(slices.Collect(maps.Keys(secret.Data)))
	}
	renewed, fresh, err := renewKubeconfig(ctx, secret.Data[used], option)
	if err != nil {
		return token{}, err
	}
	key := cmp.Or(option.KubeconfigKeyName, RenewedKubeconfigKey)
	if err := r.writeKubeconfig(ctx, secret, key, renewed); err != nil {
		return token{}, err
	}
	if err := r.useKubeconfig(ctx, live, key); err != nil {
		return token{}, err
	}
	cluster.Spec.KubeconfigKeyName = live.Spec.KubeconfigKeyName
	cluster.Status.LastReconciledTokenRequestAt = live.Status.LastReconciledTokenRequestAt
	return fresh, nil
}

// writeKubeconfig writes the kubeconfig into the Secret, unless that was changed since it was read.
func (r Renewal) writeKubeconfig(ctx context.Context, secret *corev1.Secret, key string, kubeconfig []byte) error {
	before := secret.DeepCopy()
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	secret.Data[key] = kubeconfig
	// A registration that fails from now on must not put the Secret back: the cluster is about to refer to the new key.
	delete(secret.Annotations, rollback.AttemptAnnotation)
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := r.Hub.Patch(ctx, secret, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("keep the renewed kubeconfig: %w", err)
	}
	return nil
}

// useKubeconfig makes the cluster use the kubeconfig under key, unless the cluster was changed since it was read, and
// notes the time.
func (r Renewal) useKubeconfig(ctx context.Context, live *libv1beta1.SveltosCluster, key string) error {
	if live.Spec.KubeconfigKeyName != key {
		before := live.DeepCopy()
		live.Spec.KubeconfigKeyName = key
		patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
		if err := r.Hub.Patch(ctx, live, patch, client.FieldOwner(kube.FieldManager)); err != nil {
			return fmt.Errorf("use the renewed kubeconfig: %w", err)
		}
	}
	before := live.DeepCopy()
	live.Status.LastReconciledTokenRequestAt = r.Clock.Now().UTC().Format(time.RFC3339)
	if err := r.Hub.Status().Patch(ctx, live, client.MergeFrom(before), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("note the time of the renewal: %w", err)
	}
	return nil
}

// renewKubeconfig returns the kubeconfig with a new token in place of its credentials. The new one was tried.
func renewKubeconfig(ctx context.Context, current []byte, option *libv1beta1.TokenRequestRenewalOption) ([]byte, token, error) {
	config, err := fleet.ParseKubeconfig(current)
	if err != nil {
		return nil, token{}, err
	}
	loaded, err := clientcmd.Load(current)
	if err != nil {
		return nil, token{}, fmt.Errorf("parse kubeconfig: %w", err)
	}
	text, err := renewToken(ctx, config, loaded, option)
	if err != nil {
		return nil, token{}, err
	}
	inUse := loaded.Contexts[loaded.CurrentContext]
	loaded.AuthInfos[inUse.AuthInfo] = &clientcmdapi.AuthInfo{Token: text}
	renewed, err := clientcmd.Write(*loaded)
	if err != nil {
		return nil, token{}, fmt.Errorf("encode the renewed kubeconfig: %w", err)
	}
	if config, err = fleet.ParseKubeconfig(renewed); err != nil {
		return nil, token{}, err
	}
	if err := checkAccess(ctx, config); err != nil {
		return nil, token{}, fmt.Errorf("try the new token: %w", err)
	}
	return renewed, readToken(text), nil
}

// renewToken asks the member for a token.
func renewToken(
	ctx context.Context, config *rest.Config, loaded *clientcmdapi.Config, option *libv1beta1.TokenRequestRenewalOption,
) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, accessTimeout)
	defer cancel()
	member, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", fmt.Errorf("connect to the cluster: %w", err)
	}
	account, err := renewedAccount(ctx, member, loaded, option)
	if err != nil {
		return "", err
	}
	answer, err := member.CoreV1().ServiceAccounts(account.Namespace).CreateToken(ctx, account.Name, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(renewedLife(option) / time.Second))},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("request a token for ServiceAccount %s: %w", account, err)
	}
	return answer.Status.Token, nil
}

// renewedAccount finds whose token is renewed: the account that the option names, else the one that the kubeconfig
// proves to be, else the one that it is named after.
func renewedAccount(
	ctx context.Context, member kubernetes.Interface, loaded *clientcmdapi.Config, option *libv1beta1.TokenRequestRenewalOption,
) (client.ObjectKey, error) {
	account := client.ObjectKey{Namespace: option.SANamespace, Name: option.SAName}
	if account.Namespace != "" && account.Name != "" {
		return account, nil
	}
	// A member too old to know this question is no obstacle.
	if self, err := member.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{}); err == nil {
		whose, isAccount := strings.CutPrefix(self.Status.UserInfo.Username, serviceAccountUser)
		if namespace, name, ok := strings.Cut(whose, ":"); ok && isAccount {
			return client.ObjectKey{Namespace: cmp.Or(account.Namespace, namespace), Name: cmp.Or(account.Name, name)}, nil
		}
	}
	if inUse := loaded.Contexts[loaded.CurrentContext]; inUse != nil {
		account.Namespace = cmp.Or(account.Namespace, inUse.Namespace, metav1.NamespaceDefault)
		account.Name = cmp.Or(account.Name, inUse.AuthInfo)
	}
	if account.Name == "" {
		return account, errors.New("the kubeconfig does not say whose token it is; name it in spec.tokenRequestRenewalOption.saNamespace and saName")
	}
	return account, nil
}
