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
	// renewedKey holds the same kubeconfig as KubeconfigKey, out of reach of a second `kubectl apply` of the manifest, which puts the
	// manifest's token back there.
	renewedKey = "renewed-kubeconfig"
	// lookAgain is the time between two looks into the Secret for another way to the hub.
	lookAgain = 20 * time.Second
	// renewRetryMin and renewRetryMax bound the time between attempts to renew.
	renewRetryMin = time.Second
	renewRetryMax = time.Minute
)

// ErrSuperseded says that the Secret now holds a later way to the hub than the one in use: the cluster was registered again.
var ErrSuperseded = errors.New("the cluster was registered again")

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

// Credential is an agent's way to the hub: an address and a token, which Run keeps fresh while clients made from Config go on working.
type Credential struct {
	opts      CredentialOptions
	config    *rest.Config
	namespace string
	exchanged bool
	current   *atomic.Pointer[token]
}

// candidate is one kubeconfig of the Secret.
type candidate struct {
	config    *rest.Config
	namespace string
	token     token
	renewed   bool
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
		opts: opts, config: latest.config, namespace: latest.namespace, exchanged: latest.renewed, current: &atomic.Pointer[token]{},
	}
	c.current.Store(&latest.token)
	current := c.current
	c.config.BearerToken = ""
	c.config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &bearer{current: current, next: next} })
	return c, nil
}

// readCandidate returns the kubeconfig of the Secret whose token was issued last.
func readCandidate(ctx context.Context, opts CredentialOptions) (candidate, error) {
	secret, err := opts.Secrets.Get(ctx, opts.Secret, metav1.GetOptions{})
	if err != nil {
		return candidate{}, fmt.Errorf("read Secret %s/%s with the way to the hub: %w", kube.AgentNamespace, opts.Secret, err)
	}
	var latest candidate
	for _, key := range []string{KubeconfigKey, renewedKey} {
		found, parseErr := parseCandidate(secret.Data[key])
		found.renewed = key == renewedKey
		if parseErr == nil && (latest.config == nil || !found.token.issued.Before(latest.token.issued)) {
			latest = found
		}
		err = cmp.Or(err, parseErr)
	}
	if latest.config == nil {
		return candidate{}, fmt.Errorf("read key %s of Secret %s/%s: %w", KubeconfigKey, kube.AgentNamespace, opts.Secret, err)
	}
	return latest, nil
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
	return candidate{config: config, namespace: namespace, token: readToken(config.BearerToken)}, nil
}

// Config returns a configuration for the hub. Every request made with it carries the freshest token.
func (c *Credential) Config() *rest.Config { return rest.CopyConfig(c.config) }

// DeliveryNamespace is the hub namespace with the cluster's groups and bundles.
func (c *Credential) DeliveryNamespace() string { return c.namespace }

// Expires is when the token in use expires; zero if it does not say.
func (c *Credential) Expires() time.Time { return c.current.Load().expires }

// Renew exchanges the token for a new one. The new one is in the Secret before the old one is forgotten, so that a restart at any moment finds
// one that works.
func (c *Credential) Renew(ctx context.Context) error {
	hub, err := corev1client.NewForConfig(c.config)
	if err != nil {
		return fmt.Errorf("renew token: %w", err)
	}
	answer, err := hub.ServiceAccounts(c.opts.Namespace).CreateToken(ctx, c.opts.Name, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(c.opts.Life / time.Second))},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("renew token: %w", err)
	}
	if err := c.keep(ctx, answer.Status.Token); err != nil {
		return err
	}
	fresh := readToken(answer.Status.Token)
	c.current.Store(&fresh)
	c.exchanged = true
	return nil
}

// keep writes the token into the Secret.
func (c *Credential) keep(ctx context.Context, text string) error {
	address := hubAddress{server: c.config.Host, serverName: c.config.ServerName, ca: c.config.CAData}
	kubeconfig, err := clientcmd.Write(*address.kubeconfig(text, c.namespace))
	if err != nil {
		return fmt.Errorf("encode renewed kubeconfig: %w", err)
	}
	patch, err := json.Marshal(map[string]any{"data": map[string][]byte{KubeconfigKey: kubeconfig, renewedKey: kubeconfig}})
	if err != nil {
		return fmt.Errorf("encode renewed kubeconfig: %w", err)
	}
	_, err = c.opts.Secrets.Patch(ctx, c.opts.Secret, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kube.FieldManager})
	if err != nil {
		return fmt.Errorf("keep renewed token in Secret %s/%s: %w", kube.AgentNamespace, c.opts.Secret, err)
	}
	return nil
}

// Run exchanges the manifest's token at once and then renews at 80 % of each token's life, trying again until it works. It returns when ctx
// ends, with nil, or with ErrSuperseded when the Secret holds a later registration. One Run at a time.
func (c *Credential) Run(ctx context.Context) error {
	retry := newRenewBackoff()
	next := c.firstRenewal()
	for {
		look := c.opts.Clock.Now().Add(lookAgain)
		wake := next
		if look.Before(wake) {
			wake = look
		}
		if !c.sleepUntil(ctx, wake) {
			return nil
		}
		if c.superseded(ctx) {
			return ErrSuperseded
		}
		if c.opts.Clock.Now().Before(next) {
			continue
		}
		if err := c.Renew(ctx); err != nil {
			next = c.opts.Clock.Now().Add(retry.Step())
			log.FromContext(ctx).Info("cannot renew the token for the hub yet", "reason", err.Error(), "expires", c.Expires())
			continue
		}
		retry = newRenewBackoff()
		// Counted from now and not from the time in the token: the clocks of hub and member need not agree.
		next = c.opts.Clock.Now().Add(c.current.Load().untilDue(c.opts.Life))
	}
}

func newRenewBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: renewRetryMin, Factor: 2, Jitter: 0.5, Steps: 10, Cap: renewRetryMax}
}

func (c *Credential) firstRenewal() time.Time {
	if !c.exchanged {
		return c.opts.Clock.Now()
	}
	current := c.current.Load()
	return current.issued.Add(current.untilDue(c.opts.Life))
}

// superseded says whether the Secret holds a kubeconfig that is later than the one in use. What cannot be read is not.
func (c *Credential) superseded(ctx context.Context) bool {
	latest, err := readCandidate(ctx, c.opts)
	return err == nil && latest.token.issued.After(c.current.Load().issued)
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

// bearer puts the freshest token on every request.
type bearer struct {
	current *atomic.Pointer[token]
	next    http.RoundTripper
}

// RoundTrip sends the request with the freshest token.
func (b *bearer) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.Header.Set("Authorization", "Bearer "+b.current.Load().text)
	return b.next.RoundTrip(request)
}

// WrappedRoundTripper returns the transport below, for those who need to see it.
func (b *bearer) WrappedRoundTripper() http.RoundTripper { return b.next }
