package summaries

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

const (
	// generatedType is the type of Secrets with generated values.
	generatedType corev1.SecretType = "towline.dev/generated-values"
	// generatedDataKey is the key in such a Secret: the values as JSON, compressed with zstd.
	generatedDataKey = "values.json.zst"
	// releaseAnnotation has the namespace and the name of the release.
	releaseAnnotation = "towline.dev/release"
	// maxGenerated is the maximum size in bytes of the compressed values. The limit of a Secret is 1 MiB.
	maxGenerated = 1000 << 10
	// maxGeneratedDecoded is the maximum size in bytes of the values before compression. It limits the memory that a
	// decompression needs.
	maxGeneratedDecoded = 64 << 20
)

// generatedStore stores the generated values of one release on one member in a Secret on the hub. A rendering calls
// load if the chart generates values. save must be called before the rendered objects are delivered. render.Generated
// also has results of lookup, and the rendered objects that lookup finds in the next upgrade: they are pending until
// the member has deployed the rendering.
type generatedStore struct {
	hub     client.Client
	member  fleet.Member
	summary *configv1beta1.ClusterSummary
	release match.Release
	// ensureFinalizer is ComposeRequest.EnsureFinalizer.
	ensureFinalizer func(ctx context.Context) error
	// isManagedByOther is true if another summary manages the release.
	isManagedByOther bool
	// startedID is the renderingID of the delivered release if the member may have started to deploy it, otherwise "".
	// deployedID is the same ID if the member has deployed the release, otherwise "".
	startedID, deployedID string
	// secret is the Secret that load has read or save has written. It has no resourceVersion if the Secret does not exist.
	// stored has the values that load has read. Both are nil before load.
	secret *corev1.Secret
	stored render.Generated
	// isIncomplete is true if save has omitted results that the rendering used: the next rendering can get other results.
	isIncomplete bool
}

// newGeneratedStore returns the store of a release for r.
func (c *Composer) newGeneratedStore(r ComposeRequest, release match.Release) *generatedStore {
	store := &generatedStore{hub: c.Hub, member: r.Member, summary: r.Summary, release: release, ensureFinalizer: r.EnsureFinalizer}
	store.isManagedByOther = slices.ContainsFunc(r.Conflicts, func(conflict match.Conflict) bool { return conflict.Release == release })
	former, ok := findDeployedRelease(r, release)
	if !ok || store.isManagedByOther {
		return store
	}
	if r.mayHaveBegun(release) {
		store.startedID = renderingID(former.Inputs, former.Revision, former.IsUpgrade)
	}
	if r.State == bundle.StateApplied {
		store.deployedID = store.startedID
	}
	return store
}

// renderingID identifies a rendering of a release. It is "" for a chart that reads neither the revision nor the
// operation, since the member does not compare the revision of such a release.
func renderingID(inputs string, revision int, isUpgrade bool) string {
	if inputs == "" {
		return ""
	}
	return fmt.Sprintf("%s %d %t", inputs, revision, isUpgrade)
}

// generatedSecretName returns the name of the Secret for a release on a member. It does not depend on the profile, so
// that another profile can take over the release with its values.
func generatedSecretName(m fleet.Member, release match.Release) client.ObjectKey {
	identity := []string{string(m.Type), m.Namespace, m.Name, m.UID, release.Namespace, release.Name}
	sum := sha256.Sum256([]byte(strings.Join(identity, "\x00")))
	return client.ObjectKey{Namespace: m.Namespace, Name: "towline-generated-" + hex.EncodeToString(sum[:10])}
}

// generatedReferences returns references to the Secrets with generated values of a summary. They are watched, because
// users delete such a Secret to generate new values.
func generatedReferences(r ComposeRequest) []source.Reference {
	var all []source.Reference
	charts, _ := expandChartNames(r.Summary.Spec.ClusterProfileSpec.HelmCharts, r.TemplateContext) // Compose returns the error
	for _, chart := range charts {
		name := generatedSecretName(r.Member, match.Release{Namespace: chart.ReleaseNamespace, Name: chart.ReleaseName})
		all = append(all, source.Reference{Kind: "Secret", Namespace: name.Namespace, Name: name.Name})
	}
	return all
}

func (g *generatedStore) key() client.ObjectKey { return generatedSecretName(g.member, g.release) }

// load returns the stored values for the next rendering. Pending objects count as deployed if the member may have
// started to deploy their rendering. load reads from the API server: with a stale cache the chart would generate new
// values.
func (g *generatedStore) load(ctx context.Context) (render.Generated, error) {
	secret := &corev1.Secret{}
	err := g.hub.Get(ctx, g.key(), secret)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read generated values of release %s: %w", g.release, err)
	}
	stored := render.Generated{}
	if err == nil {
		if stored, err = decodeGenerated(secret.Data[generatedDataKey]); err != nil {
			return nil, fmt.Errorf("read generated values in Secret %s: %w", g.key(), err)
		}
	}
	g.secret, g.stored = secret, stored
	return stored.PromotePending(g.startedID)
}

// save adds the values that a rendering used to the loaded values, and stores them. It does nothing if load was not
// called. rendering is the renderingID. save fails with a conflict if another process has changed the Secret since
// load.
func (g *generatedStore) save(ctx context.Context, rendering string, used render.Generated) error {
	if g.secret == nil || len(used) == 0 {
		return nil
	}
	all, err := g.merge(rendering, used)
	if err != nil {
		return err
	}
	g.isIncomplete = !hasResults(all, used)
	owners := addOwner(addOwner(g.secret.OwnerReferences, clusterOwner(g.member)), summaryOwner(g.summary))
	if len(owners) == len(g.secret.OwnerReferences) && equalGenerated(all, g.stored) {
		return nil
	}
	// If the values are too large, save omits the rendered objects, and lookup then does not find them in the next
	// upgrade. If that is not enough, it also omits the results of lookup, and each rendering then reads the member. At
	// last it omits all values that this rendering has not used.
	var tooLarge phase.TerminalError
	for _, values := range []render.Generated{all, all.WithoutRendered(), all.WithoutLookup(), used.WithoutLookup()} {
		raw, err := encodeGenerated(values)
		if err == nil {
			g.isIncomplete = !hasResults(values, used)
			return g.write(ctx, raw, owners)
		}
		if !errors.As(err, &tooLarge) {
			return err
		}
	}
	return tooLarge
}

// merge returns the loaded values together with the values that a rendering used. Only the summary that manages the
// release stores results of lookup and objects: otherwise two summaries would overwrite each other's results, and each
// change of the Secret would reconcile both.
func (g *generatedStore) merge(rendering string, used render.Generated) (render.Generated, error) {
	if g.isManagedByOther {
		all := maps.Clone(g.stored)
		maps.Copy(all, used.WithoutLookup())
		return all, nil
	}
	deployed, err := g.stored.PromotePending(g.deployedID)
	if err != nil || rendering == "" || rendering == g.deployedID {
		return deployed.AfterRendering(used), err
	}
	return deployed.AfterRendering(used).WithPending(rendering, deployed)
}

// hasResults returns whether values has all results of template functions in used. Rendered objects may be missing.
func hasResults(values, used render.Generated) bool {
	for key := range used.WithoutRendered() {
		if _, ok := values[key]; !ok {
			return false
		}
	}
	return true
}

// addInputs returns b with the Secret as an input if load was called, and with hasUnknownInputs if isIncomplete.
func (g *generatedStore) addInputs(b builtInputs) builtInputs {
	if g.secret != nil {
		key := g.key()
		b.generated = append(b.generated, InputObject{
			Reference: source.Reference{Kind: "Secret", Namespace: key.Namespace, Name: key.Name}, UID: g.secret.UID, Version: g.secret.ResourceVersion,
		})
	}
	b.hasUnknownInputs = b.hasUnknownInputs || g.isIncomplete
	return b
}

func equalGenerated(a, b render.Generated) bool {
	return maps.EqualFunc(a, b, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) })
}

// write creates the Secret, or updates it if it still has the resourceVersion of load.
func (g *generatedStore) write(ctx context.Context, raw []byte, owners []metav1.OwnerReference) error {
	if err := g.ensureFinalizer(ctx); err != nil {
		return err
	}
	desired := g.secret.DeepCopy()
	desired.Namespace, desired.Name, desired.Type = g.key().Namespace, g.key().Name, generatedType
	desired.Annotations = map[string]string{releaseAnnotation: g.release.String()}
	desired.OwnerReferences = owners
	desired.Data = map[string][]byte{generatedDataKey: raw}
	var err error
	if desired.ResourceVersion == "" {
		err = g.hub.Create(ctx, desired, client.FieldOwner(kube.FieldManager))
	} else {
		err = g.hub.Update(ctx, desired, client.FieldOwner(kube.FieldManager)) // with the resourceVersion of load
	}
	if err != nil {
		return fmt.Errorf("store generated values of release %s: %w", g.release, err)
	}
	g.secret = desired
	return nil
}

// encodeGenerated returns values as compressed JSON. It fails with phase.TerminalError if they are too large.
func encodeGenerated(values render.Generated) ([]byte, error) {
	raw, err := json.Marshal(values)
	if err != nil {
		return nil, fmt.Errorf("encode generated values: %w", err)
	}
	if len(raw) > maxGeneratedDecoded {
		return nil, phase.TerminalErrorf("the generated values of the chart have %d MiB, the limit is %d", len(raw)>>20, maxGeneratedDecoded>>20)
	}
	encoder, err := zstd.NewWriter(nil)
	if err != nil {
		return nil, fmt.Errorf("compress generated values: %w", err)
	}
	defer encoder.Close()
	compressed := encoder.EncodeAll(raw, nil)
	if len(compressed) > maxGenerated {
		return nil, phase.TerminalErrorf("the compressed generated values of the chart have %d KiB, the limit of a Secret is %d", len(compressed)>>10, maxGenerated>>10)
	}
	return compressed, nil
}

func decodeGenerated(raw []byte) (render.Generated, error) {
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(maxGeneratedDecoded))
	if err != nil {
		return nil, fmt.Errorf("create decoder: %w", err)
	}
	defer decoder.Close()
	decoded, err := decoder.DecodeAll(raw, nil)
	if err != nil {
		return nil, fmt.Errorf("decompress key %s: %w", generatedDataKey, err)
	}
	values := render.Generated{}
	if err := json.Unmarshal(decoded, &values); err != nil {
		return nil, fmt.Errorf("parse key %s: %w", generatedDataKey, err)
	}
	return values, nil
}
