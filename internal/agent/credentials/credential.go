// Package credentials keeps the credential of the agent of a SveltosCluster for the hub: it reads the kubeconfig that a
// registration wrote to the cluster, exchanges its token at once, and renews the token before it expires. Each session
// of the agent calls Open, Exchange and Run. Start reading there.
//
// Words:
//
//   - manifest: the YAML that registers a cluster. It has a Secret with a kubeconfig, which has the manifest's token.
//   - exchange: replace the manifest's token with a token of the agent, because others may have a copy of the manifest.
//   - renewed: has a token that the agent has requested, not the manifest's token.
//   - superseded: the Secret has a later kubeconfig than the one in use, because the cluster was registered again.
package credentials

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

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

const (
	// DefaultLife is the requested life of an agent's token. The hub may issue a token with a shorter life.
	DefaultLife = 24 * time.Hour
	// renewedKey is the key of a second copy of the renewed kubeconfig. A `kubectl apply` of the manifest overwrites
	// join.KubeconfigKey, but not this key.
	renewedKey = "renewed-kubeconfig"
	// secretPollInterval is the maximum time between two reads of the Secret by Run, to detect a new manifest.
	secretPollInterval = 5 * time.Second
	// renewRetryMin and renewRetryMax are the limits of the backoff between attempts to renew, without the jitter.
	renewRetryMin = time.Second
	renewRetryMax = 10 * time.Second
	// requestTimeout is the timeout of one request to the hub or to the member.
	requestTimeout = 15 * time.Second
)

// ErrSuperseded is returned if the Secret has a later kubeconfig than the one in use, because the cluster was
// registered again. The caller must call Open again.
var ErrSuperseded = errors.New("the cluster was registered again")

// ErrRejected is returned if the hub rejects the token, because the token has expired or was revoked. Repair returns
// the commands for a new token.
var ErrRejected = errors.New("the hub refuses the credential")

// Repair returns, in one line, the commands that give the agent of a pull-mode cluster a new credential.
func Repair(namespace, cluster string) string {
	return fmt.Sprintf("with the hub's kubeconfig run: sveltosctl register cluster --namespace=%s --cluster=%s --pullmode > registration.yaml; "+
		"then with this cluster's kubeconfig run: kubectl apply -f registration.yaml", namespace, cluster)
}

// Options identify the cluster of a Credential and the Secret with its kubeconfig.
type Options struct {
	// Secrets is a client for the Secrets in kube.AgentNamespace on the member.
	Secrets corev1client.SecretInterface
	// Secret is the name of the Secret with the kubeconfig.
	Secret string
	// Namespace and Name are the key of the SveltosCluster on the hub. The agent's ServiceAccount has the same key.
	Namespace string
	Name      string
	// Life is the requested life of a token, at least ten minutes. Default: DefaultLife.
	Life time.Duration
	// Clock is for tests. Default: the real clock.
	Clock clock.Clock
}

// Credential is the address of the hub and a token that Run renews. Clients with the configuration of Config always use
// the current token.
type Credential struct {
	opts              Options
	config            *rest.Config
	address           join.HubAddress
	deliveryNamespace string                     // on the hub
	current           atomic.Pointer[join.Token] // the token in use
	// isRenewed is false for the manifest's token, and true for a token that the agent requested.
	isRenewed          atomic.Bool
	exchangedSecretUID atomic.Pointer[types.UID] // see ExchangedSecretUID; never nil
	// isRejected is true if the last response of the hub was 401 Unauthorized.
	isRejected atomic.Bool
}

// storedKubeconfig is the parsed kubeconfig of one key of the Secret.
type storedKubeconfig struct {
	config  *rest.Config
	address join.HubAddress
	// deliveryNamespace is the namespace of the current context.
	deliveryNamespace string
	token             join.Token
	// isRenewed is true for the kubeconfig of renewedKey.
	isRenewed bool
	// exchangedSecretUID is the value of annotation kube.AnnotationExchanged on the Secret.
	exchangedSecretUID types.UID
}

// Open reads the latest kubeconfig of the Secret. It does not connect to the hub. It returns an error if the
// Secret has no valid kubeconfig.
func Open(ctx context.Context, opts Options) (*Credential, error) {
	if opts.Life == 0 {
		opts.Life = DefaultLife
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	latest, err := readLatest(ctx, opts)
	if err != nil {
		return nil, err
	}
	c := &Credential{opts: opts, config: latest.config, address: latest.address, deliveryNamespace: latest.deliveryNamespace}
	c.current.Store(&latest.token)
	c.isRenewed.Store(latest.isRenewed)
	exchanged := latest.exchangedSecretUID
	if !latest.isRenewed {
		exchanged = "" // the annotation is for an earlier manifest
	}
	c.exchangedSecretUID.Store(&exchanged)
	c.config.BearerToken = ""
	c.config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &bearerTransport{credential: c, next: next} })
	return c, nil
}

// readLatest returns the kubeconfig of the Secret whose token was issued last. If both tokens were issued at the same
// time, it returns the kubeconfig of renewedKey. It ignores an invalid kubeconfig, and returns an error if none is
// valid.
func readLatest(ctx context.Context, opts Options) (storedKubeconfig, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	secret, err := opts.Secrets.Get(ctx, opts.Secret, metav1.GetOptions{})
	if err != nil {
		return storedKubeconfig{}, fmt.Errorf("read Secret %s/%s with the kubeconfig for the hub: %w", kube.AgentNamespace, opts.Secret, err)
	}
	var latest storedKubeconfig
	for _, key := range []string{join.KubeconfigKey, renewedKey} {
		found, parseErr := parseKubeconfig(secret.Data[key])
		found.isRenewed, found.exchangedSecretUID = key == renewedKey, types.UID(secret.Annotations[kube.AnnotationExchanged])
		if parseErr == nil && (latest.config == nil || !latest.token.Issued.After(found.token.Issued)) {
			latest = found
		}
		err = cmp.Or(err, parseErr)
	}
	if latest.config == nil {
		return storedKubeconfig{}, fmt.Errorf("read key %s of Secret %s/%s: %w", join.KubeconfigKey, kube.AgentNamespace, opts.Secret, err)
	}
	return latest, nil
}

func parseKubeconfig(kubeconfig []byte) (storedKubeconfig, error) {
	if len(kubeconfig) == 0 {
		return storedKubeconfig{}, errors.New("it is empty")
	}
	config, err := fleet.ParseKubeconfig(kubeconfig)
	if err != nil {
		return storedKubeconfig{}, err
	}
	raw, err := fleet.LoadKubeconfig(kubeconfig)
	if err != nil {
		return storedKubeconfig{}, fmt.Errorf("parse kubeconfig: %w", err)
	}
	current := raw.Contexts[raw.CurrentContext]
	if current == nil {
		return storedKubeconfig{}, errors.New("parse kubeconfig: it has no current context")
	}
	address := join.HubAddress{Server: config.Host, ServerName: config.ServerName, CA: config.CAData}
	if cluster := raw.Clusters[current.Cluster]; cluster != nil {
		address.ProxyURL = cluster.ProxyURL
	}
	return storedKubeconfig{
		config: config, address: address, deliveryNamespace: cmp.Or(current.Namespace, metav1.NamespaceDefault), token: join.ReadToken(config.BearerToken),
	}, nil
}

// Config returns a copy of the configuration for the hub. Each request of a client with it has the current token.
func (c *Credential) Config() *rest.Config { return rest.CopyConfig(c.config) }

// DeliveryNamespace returns the hub namespace with the cluster's groups and bundles.
func (c *Credential) DeliveryNamespace() string { return c.deliveryNamespace }

// Expires returns the expiry of the current token, zero if it is not known.
func (c *Credential) Expires() time.Time { return c.current.Load().Expires }

// ExchangedSecretUID returns the UID of the Secret on the hub to which the exchanged token of the manifest is bound. It
// returns "" before the exchange, and if the token was not bound to a Secret. An annotation of the kubeconfig Secret
// stores it for restarts.
func (c *Credential) ExchangedSecretUID() types.UID { return *c.exchangedSecretUID.Load() }

// Exchange replaces the manifest's token with a new token of the agent's ServiceAccount. It does nothing for a token
// that the agent has requested. It must precede all other requests to the hub. It returns ErrRejected if the hub
// rejects the manifest's token.
func (c *Credential) Exchange(ctx context.Context) error {
	if c.isRenewed.Load() {
		return nil
	}
	return c.Renew(ctx)
}

// Renew requests a new token with the current one, writes it to the Secret, and then uses it. The Secret has a valid
// token at any time, so that the agent may restart. It returns ErrRejected if the hub rejects the current token. After
// an error the current token stays in use.
func (c *Credential) Renew(ctx context.Context) error {
	text, err := c.requestToken(ctx)
	if apierrors.IsUnauthorized(err) {
		err = fmt.Errorf("%w: %w", ErrRejected, err)
	}
	if err != nil {
		return fmt.Errorf("renew token: %w", err)
	}
	exchanged := c.ExchangedSecretUID()
	if !c.isRenewed.Load() {
		exchanged = c.current.Load().BoundTo
	}
	if err := c.writeSecret(ctx, text, exchanged); err != nil {
		return err
	}
	fresh := join.ReadToken(text)
	c.current.Store(&fresh)
	c.exchangedSecretUID.Store(&exchanged)
	c.isRenewed.Store(true)
	return nil
}

// requestToken requests a token that is bound to join.AnchorSecret. The hub revokes it by deleting that Secret.
func (c *Credential) requestToken(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	hub, err := corev1client.NewForConfig(c.config)
	if err != nil {
		return "", err
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(int64(c.opts.Life / time.Second)),
		BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Secret", Name: join.AnchorSecret(c.opts.Name)},
	}}
	response, err := hub.ServiceAccounts(c.opts.Namespace).CreateToken(ctx, c.opts.Name, request, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return response.Status.Token, nil
}

// writeSecret writes a kubeconfig with the token under both keys of the Secret, and exchanged to its annotation.
func (c *Credential) writeSecret(ctx context.Context, token string, exchanged types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	kubeconfig, err := clientcmd.Write(*c.address.Kubeconfig(token, c.deliveryNamespace))
	if err != nil {
		return fmt.Errorf("encode renewed kubeconfig: %w", err)
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{kube.AnnotationExchanged: exchanged}},
		"data":     map[string][]byte{join.KubeconfigKey: kubeconfig, renewedKey: kubeconfig},
	})
	if err != nil {
		return fmt.Errorf("encode renewed kubeconfig: %w", err)
	}
	_, err = c.opts.Secrets.Patch(ctx, c.opts.Secret, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kube.FieldManager})
	if err != nil {
		return fmt.Errorf("write the renewed token to Secret %s/%s: %w", kube.AgentNamespace, c.opts.Secret, err)
	}
	return nil
}

// Run renews the token whenever join.Token.RenewAfter has passed, and the manifest's token at once. It retries after
// errors. It returns nil if ctx ends, ErrSuperseded if the Secret has a later kubeconfig, and ErrRejected if the hub
// rejects the token. Only one Run may be active.
func (c *Credential) Run(ctx context.Context) error {
	retry := newRenewBackoff()
	next := c.firstRenewal()
	for {
		if !c.sleep(ctx, min(next.Sub(c.opts.Clock.Now()), secretPollInterval)) {
			return nil
		}
		if c.IsSuperseded(ctx) {
			return ErrSuperseded
		}
		// After a 401 response to any request, Renew is called early: only its error decides that the token is rejected.
		if c.opts.Clock.Now().Before(next) && !c.isRejected.Load() {
			continue
		}
		if err := c.Renew(ctx); err != nil {
			if errors.Is(err, ErrRejected) {
				return err
			}
			next = c.opts.Clock.Now().Add(retry.Step())
			log.FromContext(ctx).Info("cannot renew the token for the hub yet", "reason", err.Error(), "expires", c.Expires())
			continue
		}
		retry = newRenewBackoff()
		// The member's clock is used instead of the time of issue in the token, because the clocks may differ.
		next = c.opts.Clock.Now().Add(c.current.Load().RenewAfter(c.opts.Life))
	}
}

func newRenewBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: renewRetryMin, Factor: 2, Jitter: 0.5, Steps: 10, Cap: renewRetryMax}
}

// firstRenewal returns the time of the first renewal by Run. For the manifest's token it is the current time.
func (c *Credential) firstRenewal() time.Time {
	if !c.isRenewed.Load() {
		return c.opts.Clock.Now()
	}
	current := c.current.Load()
	return current.Issued.Add(current.RenewAfter(c.opts.Life))
}

// IsSuperseded reads the Secret. It returns true if the latest kubeconfig in it has another token than the current one,
// and is from a manifest or was issued later. It returns false if the Secret cannot be read.
func (c *Credential) IsSuperseded(ctx context.Context) bool {
	latest, err := readLatest(ctx, c.opts)
	current := c.current.Load()
	if err != nil || latest.token.Text == current.Text {
		return false
	}
	return !latest.isRenewed || latest.token.Issued.After(current.Issued)
}

// sleep waits for the duration of pause. It returns false if ctx ends.
func (c *Credential) sleep(ctx context.Context, pause time.Duration) bool {
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

// bearerTransport is a transport that adds the current token to each request, and sets isRejected from the response.
type bearerTransport struct {
	credential *Credential
	next       http.RoundTripper
}

// RoundTrip sends a copy of the request with the current token.
func (b *bearerTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.Header.Set("Authorization", "Bearer "+b.credential.current.Load().Text)
	response, err := b.next.RoundTrip(request)
	if err == nil {
		b.credential.isRejected.Store(response.StatusCode == http.StatusUnauthorized)
	}
	return response, err
}

// WrappedRoundTripper returns the next transport. It implements RoundTripperWrapper of
// k8s.io/apimachinery/pkg/util/net.
func (b *bearerTransport) WrappedRoundTripper() http.RoundTripper { return b.next }
