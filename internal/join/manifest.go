package join

import (
	"bytes"
	"cmp"
	"context"
	_ "embed" // for agent.yaml
	"encoding/json"
	"fmt"
	"text/template"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// DefaultAgentImage is the default container image of the agent.
const DefaultAgentImage = "towline:latest"

// The names of the agent's objects on a member, the same as in Sveltos. Existing manifests and patches contain them.
const (
	agentName         = "sveltos-applier"
	agentDeployment   = "sveltos-applier-manager"
	agentRole         = "sveltos-applier-manager-role"
	agentNameLabel    = "app.kubernetes.io/name"
	controlPlaneLabel = "control-plane"
)

// KubeconfigSecret returns the name of the Secret with a kubeconfig: in push mode, on the hub, the kubeconfig for the
// member; in pull mode, on the member, the agent's kubeconfig for the hub.
func KubeconfigSecret(cluster string) string { return fleet.KubeconfigSecretName(cluster) }

// KubeconfigKey is the key of the kubeconfig in that Secret.
const KubeconfigKey = "kubeconfig"

// agentManifest has the inputs of the manifest for one member.
type agentManifest struct {
	request Request
	options AgentOptions
	// image is the default of options.Image.
	image      string
	version    string
	kubeconfig *clientcmdapi.Config
	// patches are applied to the objects in this order.
	patches []patch
}

// encode returns the patched objects as YAML documents, in the order in which they must be applied. It returns ErrPatch
// if a patch cannot be applied.
func (m agentManifest) encode() ([]byte, error) {
	credentials, err := clientcmd.Write(*m.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("encode the agent's kubeconfig: %w", err)
	}
	objects, err := m.objects(credentials)
	if err != nil {
		return nil, err
	}
	for _, p := range m.patches {
		if err := p.applyTo(objects); err != nil {
			return nil, err
		}
	}
	var out bytes.Buffer
	for i, obj := range objects {
		text, err := yaml.Marshal(obj.Object)
		if err != nil {
			return nil, fmt.Errorf("encode the manifest: %w", err)
		}
		if i > 0 {
			out.WriteString("---\n")
		}
		out.Write(text)
	}
	return out.Bytes(), nil
}

//go:embed agent.yaml
var agentYAML string

// RenderManifest executes a template for YAML, and returns the objects. The template function json encodes a value as
// JSON, which is also YAML, so that a value cannot add fields.
func RenderManifest(manifest string, values any) ([]*unstructured.Unstructured, error) {
	encode := func(value any) (string, error) {
		text, err := json.Marshal(value)
		return string(text), err
	}
	parsed, err := template.New("manifest").Funcs(template.FuncMap{"json": encode}).Parse(manifest)
	if err != nil {
		return nil, fmt.Errorf("parse the manifest: %w", err)
	}
	var text bytes.Buffer
	if err := parsed.Execute(&text, values); err != nil {
		return nil, fmt.Errorf("encode the manifest: %w", err)
	}
	return kube.DecodeManifest(text.Bytes())
}

// objects returns the objects of agent.yaml with the label of the agent, before the patches.
func (m agentManifest) objects(credentials []byte) ([]*unstructured.Unstructured, error) {
	requests, limits, err := m.options.resources()
	if err != nil {
		return nil, err
	}
	values := map[string]any{
		"Image": cmp.Or(m.options.Image, m.image, DefaultAgentImage), "Requests": requests, "Limits": limits,
		"Secret": KubeconfigSecret(m.request.Name), "Kubeconfig": credentials,
		"Args": []string{
			"agent",
			"--diagnostics-address=:8443",
			"--cluster-namespace=" + m.request.Namespace,
			"--cluster-name=" + m.request.Name,
			"--cluster-type=sveltos",
			"--secret-with-kubeconfig=" + KubeconfigSecret(m.request.Name),
			"--v=5",
			"--version=" + m.version,
		},
	}
	var secrets []corev1.LocalObjectReference
	for _, name := range m.options.ImagePullSecrets {
		secrets = append(secrets, corev1.LocalObjectReference{Name: name})
	}
	values["ImagePullSecrets"] = secrets
	objects, err := RenderManifest(agentYAML, values)
	for _, obj := range objects {
		obj.SetLabels(map[string]string{agentNameLabel: agentName})
	}
	return objects, err
}

// ManifestKey is the key of the manifest in the registration Secret.
const ManifestKey = "manifest.yaml"

// manifestTokenKey is the key of the manifest's token in the registration Secret.
const manifestTokenKey = "token"

// Manifests writes manifests to the registration Secrets of pull-mode clusters whose agent has never connected.
type Manifests struct {
	Hub client.Client
	// Cache reads Leases, and the metadata of Secrets and namespaces. It may be stale: the next change of the Lease or the
	// cluster triggers another reconcile.
	Cache client.Reader
	// Address is the default address of the hub for agents. AgentOptions can replace it.
	Address HubAddress
	// Image is the default of AgentOptions.Image. Default: DefaultAgentImage.
	Image string
	// Version is the value of the agent's flag --version: the release of Towline.
	Version string
	Clock   clock.Clock
}

// Reconcile writes or deletes the registration Secret of a cluster. Establish must have returned for the cluster. Until
// the agent connects, Reconcile keeps a manifest in the Secret, and renews its token after renewalFraction of its life.
// When the agent has connected, or has exchanged the token for one of its own, it deletes the Secret: all copies of the
// manifest become invalid. It keeps a Secret without a manifest, which RegisterPull creates, until the agent has
// exchanged the token. Reconcile must be called again after the returned time, unless that is zero. It returns
// ErrNoHubAddress if no address for the agent is known, and ErrPatch if the manifest cannot be patched; then the Secret
// keeps the earlier manifest.
func (m Manifests) Reconcile(ctx context.Context, cluster *libv1beta1.SveltosCluster) (again time.Duration, err error) {
	if !cluster.Spec.PullMode || cluster.DeletionTimestamp != nil {
		return 0, nil
	}
	r, lease := registrationOf(m.Hub, cluster), &coordinationv1.Lease{}
	if _, err := read(ctx, m.Cache, lease, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}); err != nil {
		return 0, err
	}
	existing, err := r.registrationSecretMetadata(ctx, m.Cache)
	if err != nil {
		return 0, err
	}
	if existing != nil && lease.Annotations[kube.AnnotationExchanged] == string(existing.UID) {
		return 0, deleteObject(ctx, m.Hub, existing)
	}
	// A Lease that is older than the cluster belongs to an earlier cluster with the same name.
	isEarlier := lease.CreationTimestamp.Before(&cluster.CreationTimestamp)
	if !cluster.Status.Ready && (lease.Spec.RenewTime == nil || isEarlier) {
		r.isNew = existing == nil
		return m.ensureManifest(ctx, r, cluster)
	}
	if existing == nil {
		return 0, nil
	}
	secret := &corev1.Secret{}
	if found, err := read(ctx, m.Hub, secret, client.ObjectKeyFromObject(existing)); !found || err != nil || len(secret.Data) == 0 {
		return 0, err
	}
	return 0, deleteObject(ctx, m.Hub, secret)
}

// ensureManifest writes a manifest with a new token to the registration Secret, if the Secret has no manifest, or its
// token must be renewed, or the rest of the manifest has changed. It returns the time until the next renewal.
func (m Manifests) ensureManifest(ctx context.Context, r *registration, cluster *libv1beta1.SveltosCluster) (time.Duration, error) {
	options, err := ParseAgentOptions(cluster.Annotations[kube.AnnotationAgentOptions])
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
	secret, err := r.ensureRegistrationSecret(ctx, clusterOwner(cluster))
	if err != nil {
		return 0, err
	}
	agent := agentManifest{request: r.request, options: options, image: m.Image, version: m.Version, patches: patches}
	encode := func(token string) ([]byte, error) {
		agent.kubeconfig = address.Kubeconfig(token, deliveryNamespace(cluster))
		return agent.encode()
	}
	life := options.manifestTokenLife()
	existing := ReadToken(string(secret.Data[manifestTokenKey]))
	manifest, err := encode(existing.Text)
	if err != nil {
		return 0, err
	}
	left := existing.Issued.Add(existing.RenewAfter(life)).Sub(m.Clock.Now())
	// After a restore the Secret has a new uid, and its token is invalid.
	if left > 0 && existing.BoundTo == secret.UID && bytes.Equal(manifest, secret.Data[ManifestKey]) {
		return left, nil
	}
	issued, err := requestManifestToken(ctx, m.Hub, secret, life)
	if err != nil {
		return 0, err
	}
	if manifest, err = encode(issued.Text); err != nil {
		return 0, err
	}
	before := secret.DeepCopy()
	secret.Data = map[string][]byte{ManifestKey: manifest, manifestTokenKey: []byte(issued.Text)}
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := m.Hub.Patch(ctx, secret, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return 0, fmt.Errorf("write the manifest to Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return issued.RenewAfter(life), nil
}

// registrationSecretMetadata reads the metadata of the registration Secret. It returns nil if the Secret does not exist
// or is foreign.
func (r *registration) registrationSecretMetadata(ctx context.Context, cache client.Reader) (*metav1.PartialObjectMetadata, error) {
	secret := newPartialMetadata("Secret")
	found, err := read(ctx, cache, secret, client.ObjectKey{Namespace: r.request.Namespace, Name: RegistrationSecret(r.request.Name)})
	if err != nil || !found || secret.Labels[registrationLabel] != r.request.Name {
		return nil, err
	}
	return secret, nil
}
