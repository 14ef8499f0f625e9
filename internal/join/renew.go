package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
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
	// RenewedKubeconfigKey is the default key of a renewed kubeconfig, the same as in Sveltos.
	RenewedKubeconfigKey = "re-kubeconfig"
	// renewAhead is the time before the end of an interval when the renewal starts. Shorter intervals are not reduced.
	renewAhead = 10 * time.Minute
	// renewGrace is the difference between the default of the requested life and the interval.
	renewGrace = 30 * time.Minute
	// minTokenLife is the shortest life that API servers accept in a token request.
	minTokenLife = 10 * time.Minute
	// renewRetry is the time until the next attempt after an error, and the minimum time between renewals by expiry.
	renewRetry = time.Minute
)

// Renewal renews the token in a push-mode cluster's kubeconfig according to spec.tokenRequestRenewalOption.
type Renewal struct {
	// Hub reads and writes the SveltosCluster and its Secret. If it has a cache, the cache must contain Secrets.
	Hub client.Client
	// Member returns the hub's configuration for the cluster. Run reads the times of the current token from it.
	Member func(ctx context.Context, cluster *libv1beta1.SveltosCluster) (*rest.Config, error)
	// Limit is called with each configuration for the cluster, to limit its connections. It may be nil.
	Limit func(config *rest.Config) error
	Clock clock.PassiveClock
}

// Run renews the token if its renewal is due, and returns the time until the next call; 0 means never: in pull mode,
// without spec.tokenRequestRenewalOption, with an invalid interval, and for a cluster that is being deleted. It checks
// the renewed kubeconfig, writes it to the Secret, and then sets spec.kubeconfigKeyName and
// status.lastReconciledTokenRequestAt on the hub and in cluster. After an error or an interruption the cluster still
// has a valid kubeconfig; after an error, next is the time until the next attempt.
func (r Renewal) Run(ctx context.Context, cluster *libv1beta1.SveltosCluster) (next time.Duration, err error) {
	option := cluster.Spec.TokenRequestRenewalOption
	if option == nil || cluster.Spec.PullMode || !cluster.DeletionTimestamp.IsZero() {
		return 0, nil
	}
	if option.RenewTokenRequestInterval.Duration <= 0 {
		return 0, errors.New("renew the token: spec.tokenRequestRenewalOption.renewTokenRequestInterval is not positive")
	}
	config, err := r.Member(ctx, cluster)
	if err != nil {
		return renewRetry, fmt.Errorf("renew the token: %w", err)
	}
	if pause := renewalDue(cluster, ReadToken(config.BearerToken)).Sub(r.Clock.Now()); pause > 0 {
		return pause, nil
	}
	renewed, err := r.renew(ctx, cluster)
	if err != nil {
		return renewRetry, fmt.Errorf("renew the token: %w", err)
	}
	return max(renewalDue(cluster, renewed).Sub(r.Clock.Now()), time.Second), nil
}

// renewalDue returns the time of the next renewal of a token. It is one interval after the last renewal, else after the
// issue of the token, else after the creation of the cluster. If RenewAfter of the token is earlier, that time is used,
// but at least renewRetry after the last renewal: the times in a token are from the clock of the member, which may be
// wrong.
func renewalDue(cluster *libv1beta1.SveltosCluster, current Token) time.Time {
	interval := cluster.Spec.TokenRequestRenewalOption.RenewTokenRequestInterval.Duration
	if interval > renewAhead {
		interval -= renewAhead
	}
	since := cluster.CreationTimestamp.Time
	if !current.Issued.IsZero() {
		since = current.Issued
	}
	last, err := time.Parse(time.RFC3339, cluster.Status.LastReconciledTokenRequestAt)
	if err == nil {
		since = last
	}
	byInterval := since.Add(interval)
	if byExpiry := current.Issued.Add(current.RenewAfter(0)); !current.Expires.IsZero() && byExpiry.Before(byInterval) {
		if earliest := last.Add(renewRetry); byExpiry.Before(earliest) {
			return earliest
		}
		return byExpiry
	}
	return byInterval
}

func renewedLife(option *libv1beta1.TokenRequestRenewalOption) time.Duration {
	if option.TokenDuration != nil {
		return max(option.TokenDuration.Duration, minTokenLife)
	}
	return max(option.RenewTokenRequestInterval.Duration+renewGrace, minTokenLife)
}

// renew requests a token, writes the kubeconfig with it, and sets the fields of the cluster on the hub and in cluster.
func (r Renewal) renew(ctx context.Context, cluster *libv1beta1.SveltosCluster) (Token, error) {
	// The writes fail if the Secret or the spec has changed since this read: a cluster that is registered again keeps its
	// new kubeconfig.
	live, secret := &libv1beta1.SveltosCluster{}, &corev1.Secret{}
	if err := r.Hub.Get(ctx, client.ObjectKeyFromObject(cluster), live); err != nil {
		return Token{}, fmt.Errorf("read the SveltosCluster: %w", err)
	}
	option := live.Spec.TokenRequestRenewalOption
	if live.UID != cluster.UID || option == nil {
		return Token{}, errors.New("the cluster has changed meanwhile")
	}
	name := cmp.Or(live.Spec.KubeconfigName, KubeconfigSecret(live.Name))
	if err := r.Hub.Get(ctx, client.ObjectKey{Namespace: live.Namespace, Name: name}, secret); err != nil {
		return Token{}, fmt.Errorf("read the kubeconfig: %w", err)
	}
	currentKey := live.Spec.KubeconfigKeyName
	if currentKey == "" && len(secret.Data) > 0 {
		currentKey = slices.Min(slices.Collect(maps.Keys(secret.Data)))
	}
	renewed, token, err := r.renewKubeconfig(ctx, secret.Data[currentKey], option)
	if err != nil {
		return Token{}, err
	}
	key := cmp.Or(option.KubeconfigKeyName, RenewedKubeconfigKey)
	if err := r.writeKubeconfig(ctx, secret, key, renewed); err != nil {
		return Token{}, err
	}
	if err := r.useKubeconfig(ctx, live, key); err != nil {
		return Token{}, err
	}
	cluster.Spec.KubeconfigKeyName = live.Spec.KubeconfigKeyName
	cluster.Status.LastReconciledTokenRequestAt = live.Status.LastReconciledTokenRequestAt
	return token, nil
}

// writeKubeconfig writes the kubeconfig to the Secret. It returns a conflict if the Secret has changed since its read.
func (r Renewal) writeKubeconfig(ctx context.Context, secret *corev1.Secret, key string, kubeconfig []byte) error {
	before := secret.DeepCopy()
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	secret.Data[key] = kubeconfig
	// Without the annotation, the rollback of a failed registration keeps the Secret: the cluster is about to use this
	// key.
	delete(secret.Annotations, rollback.AttemptAnnotation)
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := r.Hub.Patch(ctx, secret, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("write the renewed kubeconfig: %w", err)
	}
	return nil
}

// useKubeconfig sets the key in the spec and the time in the status. It returns a conflict if the key must change and
// the cluster has changed since its read.
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

// renewKubeconfig returns current with a new token, which has passed checkAccess, in place of its credentials.
func (r Renewal) renewKubeconfig(ctx context.Context, current []byte, option *libv1beta1.TokenRequestRenewalOption) ([]byte, Token, error) {
	config, err := r.parse(current)
	if err != nil {
		return nil, Token{}, err
	}
	loaded, err := clientcmd.Load(current)
	if err != nil {
		return nil, Token{}, fmt.Errorf("parse kubeconfig: %w", err)
	}
	text, err := renewToken(ctx, config, loaded, option)
	if err != nil {
		return nil, Token{}, err
	}
	inUse := loaded.Contexts[loaded.CurrentContext]
	loaded.AuthInfos[inUse.AuthInfo] = &clientcmdapi.AuthInfo{Token: text}
	renewed, err := clientcmd.Write(*loaded)
	if err != nil {
		return nil, Token{}, fmt.Errorf("encode the renewed kubeconfig: %w", err)
	}
	if config, err = r.parse(renewed); err != nil {
		return nil, Token{}, err
	}
	if err := checkAccess(ctx, config); err != nil {
		return nil, Token{}, fmt.Errorf("try the new token: %w", err)
	}
	return renewed, ReadToken(text), nil
}

// parse parses a kubeconfig and limits its connections.
func (r Renewal) parse(kubeconfig []byte) (*rest.Config, error) {
	config, err := fleet.ParseKubeconfig(kubeconfig)
	if err != nil || r.Limit == nil {
		return config, err
	}
	return config, r.Limit(config)
}

// renewToken requests a new token from the member with the current kubeconfig.
func renewToken(
	ctx context.Context, config *rest.Config, loaded *clientcmdapi.Config, option *libv1beta1.TokenRequestRenewalOption,
) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, accessTimeout)
	defer cancel()
	member, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", fmt.Errorf("connect to the cluster: %w", err)
	}
	account, err := renewedAccount(ReadToken(config.BearerToken), loaded, option)
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

// renewedAccount returns the ServiceAccount of the renewed token. Namespace and name are from the option, else from the
// current token, else from the namespace and the user name in the kubeconfig.
func renewedAccount(current Token, loaded *clientcmdapi.Config, option *libv1beta1.TokenRequestRenewalOption) (client.ObjectKey, error) {
	account := client.ObjectKey{Namespace: cmp.Or(option.SANamespace, current.Account.Namespace), Name: cmp.Or(option.SAName, current.Account.Name)}
	if inUse := loaded.Contexts[loaded.CurrentContext]; inUse != nil {
		account.Namespace = cmp.Or(account.Namespace, inUse.Namespace, metav1.NamespaceDefault)
		account.Name = cmp.Or(account.Name, inUse.AuthInfo)
	}
	if account.Name == "" {
		return account, errors.New("the kubeconfig does not say whose token it is; name it in spec.tokenRequestRenewalOption.saNamespace and saName")
	}
	return account, nil
}
