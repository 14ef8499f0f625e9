package join

import (
	"bytes"
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// ManifestKey is the key of the registration Secret under which the member's manifest is, ready to apply.
const ManifestKey = "manifest.yaml"

const (
	// printedAnnotation on the registration Secret is the latest expiry, in RFC 3339, of the tokens that RegisterPull
	// printed and that are bound to the Secret.
	printedAnnotation = "towline.dev/printed-token-expires"
	// exchangePoll is the interval between two checks whether a connected agent has exchanged the manifest's token.
	exchangePoll = 10 * time.Second
)

// Manifests writes the manifests of pull-mode clusters whose agent has never connected to their registration Secrets.
type Manifests struct {
	Hub client.Client
	// Cache reads Leases, and the metadata of Secrets and namespaces. It may be stale: the reconcile after the next change
	// of the Lease or the cluster corrects the result. Default: Hub.
	Cache client.Reader
	// Address is the hub's address for agents, unless a cluster's AgentOptions have another one.
	Address HubAddress
	// Image is the agent's container image unless a cluster's AgentOptions name another one. Default: DefaultAgentImage.
	Image string
	// Version is the value of the agent's flag --version: the release of Towline.
	Version string
	// Clock is for tests. Default: the real clock.
	Clock clock.Clock
}

// Reconcile writes or deletes the registration Secret of a cluster, for which Establish has returned. While the agent
// has never connected, the Secret contains a manifest whose token has at least a fifth of its lifetime left. After
// that, Reconcile deletes the Secret as soon as its token has been exchanged or has expired, which invalidates all
// copies of the manifest. Reconcile must be called again after the returned time unless it is zero. It returns
// ErrNoHubAddress if no address for the agent is known, and ErrPatch if the manifest cannot be patched; the manifest
// before that stays in the Secret until its token expires.
func (m Manifests) Reconcile(ctx context.Context, cluster *libv1beta1.SveltosCluster) (again time.Duration, err error) {
	if !cluster.Spec.PullMode || cluster.DeletionTimestamp != nil {
		return 0, nil
	}
	m = m.withDefaults()
	r, lease := registrationOf(m.Hub, cluster), &coordinationv1.Lease{}
	if _, err := read(ctx, m.Cache, lease, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}); err != nil {
		return 0, err
	}
	existing, err := r.registrationSecretMetadata(ctx, m.Cache)
	if err != nil {
		return 0, err
	}
	if existing != nil && exchangedSecret(lease) == existing.UID {
		return 0, deleteObject(ctx, m.Hub, existing)
	}
	// An earlier Lease is of an earlier cluster with the same name.
	isEarlier := lease.CreationTimestamp.Before(&cluster.CreationTimestamp)
	if !cluster.Status.Ready && (lease.Spec.RenewTime == nil || isEarlier) {
		r.isNew = existing == nil
		return m.ensureManifest(ctx, r, cluster)
	}
	if existing == nil {
		return 0, nil
	}
	secret := &corev1.Secret{}
	if _, err := read(ctx, m.Hub, secret, client.ObjectKeyFromObject(existing)); err != nil {
		return 0, err
	}
	if secret.UID != existing.UID {
		return exchangePoll, nil // the cache is stale
	}
	if left := printedExpiry(secret).Sub(m.Clock.Now()); left > 0 {
		return min(left, exchangePoll), nil
	}
	return 0, deleteObject(ctx, m.Hub, secret)
}

func (m Manifests) withDefaults() Manifests {
	if m.Clock == nil {
		m.Clock = clock.RealClock{}
	}
	if m.Cache == nil {
		m.Cache = m.Hub
	}
	return m
}

// ensureManifest writes a manifest with a new token to the registration Secret if the Secret has none, its renewal is
// due or another part of it has changed. It returns the time until the next renewal.
func (m Manifests) ensureManifest(ctx context.Context, r *registration, cluster *libv1beta1.SveltosCluster) (time.Duration, error) {
	options, err := optionsOf(cluster)
	if err != nil {
		return 0, err
	}
	address := m.Address.withOptions(options)
	if address.Server == "" {
		return 0, ErrNoHubAddress
	}
	patches, err := patchesFor(ctx, m.Hub, m.Cache, cluster)
	if err != nil {
		return 0, err
	}
	secret, err := r.ensureRegistrationSecret(ctx, ownerOf(cluster))
	if err != nil {
		return 0, err
	}
	agent := agentManifest{request: r.request, options: options, image: m.Image, version: m.Version, patches: patches}
	encode := func(token string) ([]byte, error) {
		agent.kubeconfig = address.kubeconfig(token, deliveryNamespace(cluster))
		return agent.encode()
	}
	life := options.manifestTokenLife()
	former := tokenIn(secret.Data[ManifestKey])
	manifest, err := encode(former.text)
	if err != nil {
		return 0, err
	}
	left := former.issued.Add(former.untilRenewal(life)).Sub(m.Clock.Now())
	// After a restore the Secret has a new uid, and its token is invalid.
	if left > 0 && former.boundTo == secret.UID && bytes.Equal(manifest, secret.Data[ManifestKey]) {
		return left, nil
	}
	issued, err := requestManifestToken(ctx, m.Hub, secret, life)
	if err != nil {
		return 0, err
	}
	if manifest, err = encode(issued.text); err != nil {
		return 0, err
	}
	before := secret.DeepCopy()
	secret.Data = map[string][]byte{ManifestKey: manifest}
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := m.Hub.Patch(ctx, secret, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return 0, fmt.Errorf("write the manifest to Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return issued.untilRenewal(life), nil
}

// registrationSecretMetadata reads the metadata of the registration Secret; nil if there is none that a registration
// created.
func (r *registration) registrationSecretMetadata(ctx context.Context, cache client.Reader) (*metav1.PartialObjectMetadata, error) {
	secret := metadataOf("Secret")
	found, err := read(ctx, cache, secret, client.ObjectKey{Namespace: r.request.Namespace, Name: RegistrationSecret(r.request.Name)})
	if err != nil || !found || secret.Labels[registrationLabel] != r.request.Name {
		return nil, err
	}
	return secret, nil
}

// printedExpiry returns the expiry of the last printed token. Without the annotation, it returns the zero time if the
// hub wrote a manifest to the Secret. Otherwise a registration is about to print a manifest, and it returns the time
// MinManifestTokenLife after the creation of the Secret.
func printedExpiry(secret *corev1.Secret) time.Time {
	if at, err := time.Parse(time.RFC3339, secret.Annotations[printedAnnotation]); err == nil {
		return at
	}
	if len(secret.Data) > 0 {
		return time.Time{}
	}
	return secret.CreationTimestamp.Add(MinManifestTokenLife)
}

// annotateExpiry records the expiry of a token that is about to be printed, unless an earlier printed token expires
// later.
func annotateExpiry(ctx context.Context, hubClient client.Client, secret *corev1.Secret, until time.Time) error {
	if !until.After(printedExpiry(secret)) {
		return nil
	}
	before := secret.DeepCopy()
	metav1.SetMetaDataAnnotation(&secret.ObjectMeta, printedAnnotation, until.UTC().Format(time.RFC3339))
	if err := hubClient.Patch(ctx, secret, client.MergeFrom(before), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("annotate Secret %s with the end of the token: %w", client.ObjectKeyFromObject(secret), err)
	}
	return nil
}
