package join

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/kube"
)

const (
	// AgentTokenLife is the life that an agent asks for. The hub may give less.
	AgentTokenLife = 24 * time.Hour
	// renewedKey holds the same kubeconfig as KubeconfigKey, out of reach of a second `kubectl apply` of the manifest,
	// which puts the manifest's token back there.
	renewedKey = "renewed-kubeconfig"
	// secretPoll is the time between two looks into the Secret for another way to the hub.
	secretPoll = 5 * time.Second
	// renewRetryMin and renewRetryMax bound the time between attempts to renew.
	renewRetryMin = time.Second
	renewRetryMax = time.Minute
	// requestTimeout is how long the hub, or the member, may take for one request.
	requestTimeout = 15 * time.Second
)

// ErrSuperseded says that the Secret now holds a later way to the hub than the one in use: the cluster was registered
// again.
var ErrSuperseded = errors.New("the cluster was registered again")

// ErrRefused says that the hub does not accept the credential: it has expired, or was revoked. Repair says what to run.
var ErrRefused = errors.New("the hub refuses the credential")

// Repair says what to run where, in one line, to give the agent of a pull-mode cluster a new credential.
func Repair(namespace, cluster string) string {
	return fmt.Sprintf("with the hub's kubeconfig run: sveltosctl register cluster --namespace=%s --cluster=%s --pullmode > registration.yaml; "+
		"then with this cluster's kubeconfig run: kubectl apply -f registration.yaml", namespace, cluster)
}

// CredentialOptions say whose credential it is and where it is kept.
type CredentialOptions struct {
	// Secrets of kube.AgentNamespace on the member.
	Secrets corev1client.SecretInterface
	// Secret is the name of the Secret with the kubeconfig.
	Secret string
	// Namespace and Name are those of the cluster, and of its ServiceAccount, on the hub.
	Namespace string
	Name      string
	// Life to ask for. Default: AgentTokenLife. The hub gives no less than ten minutes.
	Life time.Duration
	// Clock tells the time. Default: the real one.
	Clock clock.Clock
}

// Credential is an agent's way to the hub: an address and a token, which Run keeps fresh while clients made from Config
// go on working.
type Credential struct {
	opts      CredentialOptions
	config    *rest.Config
	address   HubAddress
	namespace string
	current   *atomic.Pointer[token]
	// own is whether the token in use is one that the agent requested, and not the manifest's.
	own atomic.Bool
	// exchanged is the uid of the Secret that the manifest's token was bound to.
	exchanged atomic.Pointer[types.UID]
	// refused is whether the hub's last answer was that it does not accept the token.
	refused *atomic.Bool
}

// candidate is one kubeconfig of the Secret.
type candidate struct {
	config    *rest.Config
	address   HubAddress
	namespace string
	token     token
	renewed   bool
	// exchanged is what the Secret says of the exchange.
	exchanged types.UID
}

// OpenCredential reads the latest kubeconfig of the Secret. It does not connect to the hub.
func OpenCredential(ctx context.Context, opts CredentialOptions) (*Credential, error) {
	if opts.Life == 0 {
		opts.Life = AgentTokenLife
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	latest, err := readCandidate(ctx, opts)
	if err != nil {
		return nil, err
	}
	c := &Credential{
		opts: opts, config: latest.config, address: latest.address, namespace: latest.namespace,
		current: &atomic.Pointer[token]{}, refused: &atomic.Bool{},
	}
	c.current.Store(&latest.token)
	c.own.Store(latest.renewed)
	exchanged := latest.exchanged
	if !latest.renewed {
		exchanged = "" // that was another manifest
	}
	c.exchanged.Store(&exchanged)
	current, refused := c.current, c.refused
	c.config.BearerToken = ""
	c.config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return &bearer{current: current, refused: refused, next: next}
	})
	return c, nil
}

// readCandidate returns the kubeconfig of the Secret whose token was issued last.
func readCandidate(ctx context.Context, opts CredentialOptions) (candidate, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	secret, err := opts.Secrets.Get(ctx, opts.Secret, metav1.GetOptions{})
	if err != nil {
		return candidate{}, fmt.Errorf("read Secret %s/%s with the way to the hub: %w", kube.AgentNamespace, opts.Secret, err)
	}
	var latest candidate
	for _, key := range []string{KubeconfigKey, renewedKey} {
		found, parseErr := parseCandidate(secret.Data[key])
		found.renewed, found.exchanged = key == renewedKey, types.UID(secret.Annotations[kube.AnnotationExchanged])
		if parseErr == nil && (latest.config == nil || !latest.supersedes(found)) {
			latest = found
		}
		err = cmp.Or(err, parseErr)
	}
	if latest.config == nil {
		return candidate{}, fmt.Errorf("read key %s of Secret %s/%s: %w", KubeconfigKey, kube.AgentNamespace, opts.Secret, err)
	}
	return latest, nil
}

// supersedes says whether c, from the manifest, was issued after own, which the agent requested. Tokens tell whole
// seconds: within one, a manifest of a registration that the agent has not exchanged yet is the later one.
func (c candidate) supersedes(own candidate) bool {
	if !c.token.issued.Equal(own.token.issued) {
		return c.token.issued.After(own.token.issued)
	}
	return c.token.boundTo.UID != "" && c.token.boundTo.UID != own.exchanged && c.token.text != own.token.text
}

func parseCandidate(kubeconfig []byte) (candidate, error) {
	if len(kubeconfig) == 0 {
		return candidate{}, errors.New("it is empty")
	}
	client, err := clientcmd.NewClientConfigFromBytes(kubeconfig)
	if err != nil {
		return candidate{}, fmt.Errorf("parse kubeconfig: %w", err)
	}
	config, err := client.ClientConfig()
	if err != nil {
		return candidate{}, fmt.Errorf("parse kubeconfig: %w", err)
	}
	namespace, _, err := client.Namespace()
	if err != nil {
		return candidate{}, fmt.Errorf("parse kubeconfig: %w", err)
	}
	raw, err := client.RawConfig()
	if err != nil {
		return candidate{}, fmt.Errorf("parse kubeconfig: %w", err)
	}
	address := HubAddress{Server: config.Host, ServerName: config.ServerName, CA: config.CAData}
	if cluster := raw.Clusters[raw.Contexts[raw.CurrentContext].Cluster]; cluster != nil {
		address.ProxyURL = cluster.ProxyURL
	}
	return candidate{config: config, address: address, namespace: namespace, token: readToken(config.BearerToken)}, nil
}

// Config returns a configuration for the hub. Every request made with it carries the freshest token.
func (c *Credential) Config() *rest.Config { return rest.CopyConfig(c.config) }

// DeliveryNamespace is the hub namespace with the cluster's groups and bundles.
func (c *Credential) DeliveryNamespace() string { return c.namespace }

// Expires is when the token in use expires; zero if it does not say.
func (c *Credential) Expires() time.Time { return c.current.Load().expires }

// Exchanged is the uid of the Secret that the manifest's token was bound to, from when that token has been exchanged;
// "" before that, and if it was bound to none. It is known after a restart too.
func (c *Credential) Exchanged() types.UID { return *c.exchanged.Load() }

// Exchange exchanges the manifest's token for one of the agent's own. If that has been done it does nothing. It is to
// be called before the hub is asked for anything else. ErrRefused says that the hub does not accept the token.
func (c *Credential) Exchange(ctx context.Context) error {
	if c.own.Load() {
		return nil
	}
	return c.Renew(ctx)
}

// Renew exchanges the token for a new one. The new one is in the Secret before the old one is forgotten, so that a
// restart at any moment finds one that works. ErrRefused says that the hub does not accept the old one.
func (c *Credential) Renew(ctx context.Context) error {
	text, err := c.request(ctx)
	if apierrors.IsUnauthorized(err) {
		err = fmt.Errorf("%w: %w", ErrRefused, err)
	}
	if err != nil {
		return fmt.Errorf("renew token: %w", err)
	}
	exchanged := c.Exchanged()
	if !c.own.Load() {
		exchanged = c.current.Load().boundTo.UID
	}
	if err := c.writeSecret(ctx, text, exchanged); err != nil {
		return err
	}
	fresh := readToken(text)
	c.current.Store(&fresh)
	c.exchanged.Store(&exchanged)
	c.own.Store(true)
	return nil
}

// request requests a token that is bound to the anchor Secret. A hub on which the cluster was registered by a release
// without anchors has no such Secret: an unbound token has to do there.
func (c *Credential) request(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*requestTimeout)
	defer cancel()
	hub, err := corev1client.NewForConfig(c.config)
	if err != nil {
		return "", err
	}
	anchor := AnchorSecret(c.opts.Name)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(int64(c.opts.Life / time.Second)),
		BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: anchor},
	}}
	answer, err := hub.ServiceAccounts(c.opts.Namespace).CreateToken(ctx, c.opts.Name, request, metav1.CreateOptions{})
	if isMissingSecret(err) {
		request.Spec.BoundObjectRef = nil
		answer, err = hub.ServiceAccounts(c.opts.Namespace).CreateToken(ctx, c.opts.Name, request, metav1.CreateOptions{})
		if apierrors.IsForbidden(err) {
			err = fmt.Errorf("the hub has no Secret %s/%s to bind a token to, and allows no other tokens (%s): %w",
				c.opts.Namespace, anchor, Repair(c.opts.Namespace, c.opts.Name), err)
		}
	}
	if err != nil {
		return "", err
	}
	return answer.Status.Token, nil
}

func isMissingSecret(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsNotFound(err) && errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Kind == "secrets"
}

// writeSecret writes the token into the Secret, and what the manifest's token was bound to.
func (c *Credential) writeSecret(ctx context.Context, text string, exchanged types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	kubeconfig, err := clientcmd.Write(*c.address.kubeconfig(text, c.namespace))
	if err != nil {
		return fmt.Errorf("encode renewed kubeconfig: %w", err)
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{kube.AnnotationExchanged: exchanged}},
		"data":     map[string][]byte{KubeconfigKey: kubeconfig, renewedKey: kubeconfig},
	})
	if err != nil {
		return fmt.Errorf("encode renewed kubeconfig: %w", err)
	}
	_, err = c.opts.Secrets.Patch(ctx, c.opts.Secret, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kube.FieldManager})
	if err != nil {
		return fmt.Errorf("keep renewed token in Secret %s/%s: %w", kube.AgentNamespace, c.opts.Secret, err)
	}
	return nil
}

// Run exchanges the manifest's token at once and then renews at 80 % of each token's life, trying again until it works.
// It returns when ctx ends, with nil, with ErrSuperseded when the Secret holds a later registration, or with ErrRefused
// when the hub does not accept the token any more. One Run at a time.
func (c *Credential) Run(ctx context.Context) error {
	retry := newRenewBackoff()
	next := c.firstRenewal()
	for {
		look := c.opts.Clock.Now().Add(secretPoll)
		wake := next
		if look.Before(wake) {
			wake = look
		}
		if !c.sleepUntil(ctx, wake) {
			return nil
		}
		if c.Superseded(ctx) {
			return ErrSuperseded
		}
		// A token that the hub refuses is tried once more before it is given up.
		if c.opts.Clock.Now().Before(next) && !c.refused.Load() {
			continue
		}
		if err := c.Renew(ctx); err != nil {
			if errors.Is(err, ErrRefused) {
				return err
			}
			next = c.opts.Clock.Now().Add(retry.Step())
			log.FromContext(ctx).Info("cannot renew the token for the hub yet", "reason", err.Error(), "expires", c.Expires())
			continue
		}
		retry = newRenewBackoff()
		// Counted from now and not from the time in the token: the clocks of hub and member need not agree.
		next = c.opts.Clock.Now().Add(c.current.Load().untilRenewal(c.opts.Life))
	}
}

func newRenewBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: renewRetryMin, Factor: 2, Jitter: 0.5, Steps: 10, Cap: renewRetryMax}
}

func (c *Credential) firstRenewal() time.Time {
	if !c.own.Load() {
		return c.opts.Clock.Now()
	}
	current := c.current.Load()
	return current.issued.Add(current.untilRenewal(c.opts.Life))
}

// Superseded says whether the Secret holds a kubeconfig that is later than the one in use. What cannot be read is not.
func (c *Credential) Superseded(ctx context.Context) bool {
	latest, err := readCandidate(ctx, c.opts)
	current := c.current.Load()
	if err != nil || latest.token.text == current.text {
		return false
	}
	return !latest.renewed || latest.token.issued.After(current.issued)
}

func (c *Credential) sleepUntil(ctx context.Context, at time.Time) bool {
	pause := at.Sub(c.opts.Clock.Now())
	if pause <= 0 {
		return ctx.Err() == nil
	}
	timer := c.opts.Clock.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C():
		return true
	case <-ctx.Done():
		return false
	}
}

// bearer puts the freshest token on every request, and notes whether the hub accepts it.
type bearer struct {
	current *atomic.Pointer[token]
	refused *atomic.Bool
	next    http.RoundTripper
}

// RoundTrip sends the request with the freshest token.
func (b *bearer) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.Header.Set("Authorization", "Bearer "+b.current.Load().text)
	answer, err := b.next.RoundTrip(request)
	if err == nil {
		b.refused.Store(answer.StatusCode == http.StatusUnauthorized)
	}
	return answer, err
}

// WrappedRoundTripper returns the transport below, for those who need to see it.
func (b *bearer) WrappedRoundTripper() http.RoundTripper { return b.next }
