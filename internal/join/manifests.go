package join

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/kube"
)

// ManifestKey is the key of the registration Secret under which the member's manifest is, ready to apply.
const ManifestKey = "manifest.yaml"

const (
	// These annotations are on the registration Secret. All times are in RFC 3339.
	//
	// expiresAnnotation is the time when the last token expires that is bound to the Secret.
	expiresAnnotation = "towline.dev/tokens-expire"
	// renewAnnotation is the time when the manifest in the Secret must be renewed.
	renewAnnotation = "towline.dev/manifest-renewal"
	// inputsAnnotation is a digest of the manifest without its token.
	inputsAnnotation = "towline.dev/manifest-inputs"
	// printedAnnotation is the time when the last token expires that is bound to the Secret and was printed by
	// RegisterPull, or nonePrinted.
	printedAnnotation = "towline.dev/printed-token-expires"
	nonePrinted       = "none"
	// exchangePoll is the interval between two checks whether a connected agent has exchanged the manifest's token.
	exchangePoll = 10 * time.Second
)

// Manifests writes the manifests of pull-mode clusters without a connected agent to their registration Secrets.
type Manifests struct {
	Hub client.Client
	// Address is the hub's address for agents, unless a cluster's AgentOptions have another one.
	Address HubAddress
	// Image is the agent's container image unless a cluster's AgentOptions name another one. Default: DefaultAgentImage.
	Image string
	// Version is the value of the agent's flag --version: the release of Towline.
	Version string
	// Heartbeats evaluates the Leases of agents.
	Heartbeats *heartbeats.Monitor
	// Clock is for tests. Default: the real clock.
	Clock clock.Clock
}

// Reconcile writes or deletes the registration Secret of a cluster, for which Establish has returned. While the agent
// has never connected or is Down, the Secret contains a manifest whose token has at least a fifth of its lifetime left.
// While it is not known whether the agent is alive, Reconcile does not change the Secret. While the agent is connected,
// Reconcile deletes the Secret as soon as its token has been exchanged or has expired, which invalidates all copies of
// the manifest. Reconcile must be called again after the returned time unless it is zero. It returns ErrNoHubAddress if
// no address for the agent is known, and ErrPatch if the manifest cannot be patched; it removes the manifest from the
// Secret then.
func (m Manifests) Reconcile(ctx context.Context, cluster *libv1beta1.SveltosCluster) (again time.Duration, err error) {
	if !cluster.Spec.PullMode || cluster.DeletionTimestamp != nil {
		return 0, nil
	}
	if m.Clock == nil {
		m.Clock = clock.RealClock{}
	}
	r := registrationOf(m.Hub, cluster)
	if cluster.Status.Ready && cluster.Status.ConnectionStatus != libv1beta1.ConnectionDown {
		return m.deleteUnused(ctx, r, cluster)
	}
	liveness, err := m.evaluateAgent(ctx, cluster)
	if err != nil {
		return 0, err
	}
	if liveness.State == heartbeats.Unknown && liveness.HasReported {
		// The agent may be alive and need no manifest, as after a restart of the hub.
		return liveness.Remaining, nil
	}
	if liveness.State != heartbeats.Alive {
		again, err = m.ensureManifest(ctx, r, cluster)
		if errors.Is(err, ErrPatch) {
			err = errors.Join(err, m.deleteManifest(ctx, r))
		}
		return again, err
	}
	again, err = m.deleteUnused(ctx, r, cluster)
	return max(again, exchangePoll), err
}

// evaluateAgent evaluates the heartbeats in the Lease of the cluster's agent. An agent that is alive needs no manifest,
// even before its first report.
func (m Manifests) evaluateAgent(ctx context.Context, cluster *libv1beta1.SveltosCluster) (heartbeats.Liveness, error) {
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}
	if _, err := read(ctx, m.Hub, lease, key); err != nil {
		return heartbeats.Liveness{}, err
	}
	return m.Heartbeats.EvaluateLease(fleet.FromSveltosCluster(cluster), lease, ""), nil
}

// deleteUnused deletes the registration Secret of a connected cluster after its token has been exchanged or has
// expired.
func (m Manifests) deleteUnused(ctx context.Context, r *registration, cluster *libv1beta1.SveltosCluster) (time.Duration, error) {
	secret, err := r.registrationSecret(ctx)
	if err != nil || secret == nil {
		return 0, err
	}
	spent, err := exchangedSecret(ctx, m.Hub, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name})
	if err != nil {
		return 0, err
	}
	left := printedExpiry(secret, m.Clock.Now()).Sub(m.Clock.Now())
	if left > 0 && spent != secret.UID {
		return min(left, exchangePoll), nil
	}
	return 0, deleteObject(ctx, m.Hub, secret)
}

// ensureManifest writes a manifest with a new token to the registration Secret if the Secret has none, its renewal is
// due or its inputs have changed. It returns the time until the next renewal.
func (m Manifests) ensureManifest(ctx context.Context, r *registration, cluster *libv1beta1.SveltosCluster) (time.Duration, error) {
	options, err := optionsOf(cluster)
	if err != nil {
		return 0, err
	}
	address := m.Address.with(options)
	if address.Server == "" {
		return 0, ErrNoHubAddress
	}
	patches, err := patchesFor(ctx, m.Hub, cluster)
	if err != nil {
		return 0, err
	}
	agent := agentManifest{
		request: r.request, options: options, image: m.Image, version: m.Version, patches: patches,
		kubeconfig: address.kubeconfig("", deliveryNamespace(cluster)),
	}
	inputs, err := agent.encode()
	if err != nil {
		return 0, err
	}
	sum := sha256.Sum256(inputs)
	digest := hex.EncodeToString(sum[:])
	secret, err := r.ensureRegistrationSecret(ctx, ownerOf(cluster))
	if err != nil {
		return 0, err
	}
	life, err := options.manifestTokenLife()
	if err != nil {
		return 0, err
	}
	if left := m.untilRenewal(secret, life); left > 0 && secret.Annotations[inputsAnnotation] == digest {
		return left, nil
	}
	issued, err := requestToken(ctx, m.Hub, secret, life)
	if err != nil {
		return 0, err
	}
	agent.kubeconfig = address.kubeconfig(issued.text, deliveryNamespace(cluster))
	manifest, err := agent.encode()
	if err != nil {
		return 0, err
	}
	// The renewal does not depend on the times in the token: the clock of the hub may be wrong.
	due := issued.untilRenewal(life)
	notes := map[string]string{
		inputsAnnotation:  digest,
		renewAnnotation:   m.Clock.Now().Add(due).UTC().Format(time.RFC3339),
		expiresAnnotation: later(expiry(secret), m.Clock.Now().Add(issued.life(life))).UTC().Format(time.RFC3339),
	}
	if secret.Annotations[printedAnnotation] == "" && secret.Annotations[expiresAnnotation] == "" && len(secret.Data) == 0 {
		notes[printedAnnotation] = nonePrinted
	}
	return due, m.writeManifest(ctx, secret, manifest, notes)
}

// untilRenewal returns how long the manifest in the registration Secret is kept, 0 if it must be renewed now. The note
// on the Secret is believed only as far as a renewal can have written it: one that lies further ahead was written by
// somebody else, and a Secret that was restored holds a token that is worthless without the Secret from before.
func (m Manifests) untilRenewal(secret *corev1.Secret, life time.Duration) time.Duration {
	renewal, err := time.Parse(time.RFC3339, secret.Annotations[renewAnnotation])
	if err != nil || len(secret.Data[ManifestKey]) == 0 {
		return 0
	}
	kept := tokenIn(secret.Data[ManifestKey])
	if kept.boundTo.UID != "" && kept.boundTo.UID != secret.UID {
		return 0
	}
	left := renewal.Sub(m.Clock.Now())
	if left > kept.untilRenewal(life) {
		return 0
	}
	return max(left, 0)
}

// writeManifest writes the manifest into the registration Secret.
func (m Manifests) writeManifest(ctx context.Context, secret *corev1.Secret, manifest []byte, annotations map[string]string) error {
	before := secret.DeepCopy()
	if bytes.Equal(secret.Data[ManifestKey], manifest) {
		return nil
	}
	secret.Data = map[string][]byte{ManifestKey: manifest}
	for key, value := range annotations {
		metav1.SetMetaDataAnnotation(&secret.ObjectMeta, key, value)
	}
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := m.Hub.Patch(ctx, secret, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("keep the manifest in Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return nil
}

// registrationSecret reads the registration Secret; nil if there is none that a registration created.
func (r *registration) registrationSecret(ctx context.Context) (*corev1.Secret, error) {
	secret := &corev1.Secret{}
	found, err := read(ctx, r.hub, secret, client.ObjectKey{Namespace: r.request.Namespace, Name: RegistrationSecret(r.request.Name)})
	if err != nil || !found || secret.Labels[registrationLabel] != r.request.Name {
		return nil, err
	}
	return secret, nil
}

// expiry returns when the last token that is bound to the registration Secret expires. A Secret that does not say so
// was made a moment ago, or by someone who stopped half-way.
func expiry(secret *corev1.Secret) time.Time {
	if at, err := time.Parse(time.RFC3339, secret.Annotations[expiresAnnotation]); err == nil {
		return at
	}
	return secret.CreationTimestamp.Add(MinManifestTokenLife)
}

// printedExpiry returns when the last token expires that a registration printed, as far as that can be: a note that was
// lost, or that lies further ahead of now than any token lives, is replaced by the one about all tokens. A Secret
// without any note was made a moment ago by a registration that is about to print, or by someone who stopped half-way.
func printedExpiry(secret *corev1.Secret, now time.Time) time.Time {
	if secret.Annotations[printedAnnotation] == nonePrinted {
		return time.Time{}
	}
	for _, note := range []string{printedAnnotation, expiresAnnotation} {
		if at, err := time.Parse(time.RFC3339, secret.Annotations[note]); err == nil && !at.After(now.Add(MaxTokenLife)) {
			return at
		}
	}
	return secret.CreationTimestamp.Add(MinManifestTokenLife)
}

// annotateExpiry writes onto the registration Secret that a token bound to it, which is about to be printed, lives
// until then.
func annotateExpiry(ctx context.Context, hubClient client.Client, secret *corev1.Secret, until time.Time) error {
	before := secret.DeepCopy()
	last := until
	if before, err := time.Parse(time.RFC3339, secret.Annotations[printedAnnotation]); err == nil {
		last = later(before, until)
	}
	metav1.SetMetaDataAnnotation(&secret.ObjectMeta, expiresAnnotation, later(expiry(secret), until).UTC().Format(time.RFC3339))
	metav1.SetMetaDataAnnotation(&secret.ObjectMeta, printedAnnotation, last.UTC().Format(time.RFC3339))
	if err := hubClient.Patch(ctx, secret, client.MergeFrom(before), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("note the end of the token on Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
