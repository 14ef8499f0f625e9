package summaries

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// lookupTimeout bounds one request of a chart's lookup to a member.
const lookupTimeout = 10 * time.Second

// Composer builds bundles: it reads the sources of a profile and renders them for one member.
type Composer struct {
	// Contents reads the content that profiles refer to. Objects reads the Secrets with logins and keys for charts.
	Contents *source.Contents
	Objects  client.Reader
	// Hub reads and writes the Secrets with generated values. It reads from the API server.
	Hub client.Client
	// Charts fetches charts; Renderer renders them.
	Charts   *source.Charts
	Renderer *render.Charts
	// Manifests renders the objects in ConfigMaps and Secrets.
	Manifests *render.ManifestRenderer
	// Changer applies the patches and the labels of profiles.
	Changer *render.Changer
	// Kustomizations builds kustomizations.
	Kustomizations *render.KustomizationRenderer
	// MemberConfig returns, by mode, the REST config of a member. It is used for charts that call lookup or read the
	// revision. For a mode without an entry, lookup finds only Secrets and ConfigMaps of the release.
	MemberConfig map[fleet.Mode]func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// ListDeployed lists the bundles of a member, see deliver.Transport.
	ListDeployed func(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error)
	// Sandbox expands templates, see source.TemplateContext.
	Sandbox *sandbox.Pool
	// Expansions has the results of templates that are the same for all clusters, see source.TemplateContext. It may be
	// nil.
	Expansions *cache.Cache[string]
	// HubUID is the UID of the hub's namespace kube-system. Every bundle has it.
	HubUID string
	// HashKey is the key of the hashes in the status of summaries.
	HashKey status.HashKey
	// CodeVersion identifies the code that renders bundles, "" if it is not known. It is part of the inputs of a bundle.
	CodeVersion string
}

// ComposeRequest is the request to build the bundles of one summary.
type ComposeRequest struct {
	Summary *configv1beta1.ClusterSummary
	Member  fleet.Member
	// TemplateContext has the data for templates. Owner and SharedBy are fields of the bundles.
	TemplateContext source.TemplateContext
	Owner           bundle.Owner
	SharedBy        int
	// Deployed are the Helm releases in the summary's bundle on the member.
	Deployed []bundle.DeployedRelease
	// State is the state of the Helm bundle on the member, "" if it is not known.
	State bundle.State
	// Outdated is bundle.Report.Outdated of the Helm bundle on the member.
	Outdated []bundle.OutdatedRelease
	// Conflicts are the releases of the summary that another summary manages. hasUnknownConflicts is true if there can be
	// further conflicts, because a release name of another summary cannot be expanded now.
	Conflicts           []match.Conflict
	hasUnknownConflicts bool
	// charts are the charts of the summary, with expanded release names. They are set only for the feature Helm.
	charts []configv1beta1.HelmChart
	// EnsureFinalizer adds the finalizer to the summary. It is called before generated values are stored: without the
	// finalizer, they would not be deleted with the summary.
	EnsureFinalizer func(ctx context.Context) error

	// IsLocal is true if the spec of Summary has the content for the cluster of the hub, false if for the member.
	IsLocal bool

	// changes are the patches, labels and annotations of the profile for all rendered objects. Compose sets it.
	changes render.Changes
}

// Composition is the bundle of one feature, with the fields of the summary's status that describe the bundle.
type Composition struct {
	Feature  libv1beta1.FeatureID
	Bundle   bundle.Bundle
	Digest   bundle.Digest
	Releases []configv1beta1.HelmChartSummary
	// UnansweredLookups are the releases whose charts look up objects of a pull member that the hub cannot read.
	UnansweredLookups []match.Release

	builtInputs
}

// builtInputs are the inputs of a bundle that are known only after it was built.
type builtInputs struct {
	// contents are the referenced objects, URLs and Flux sources, generated the Secrets with generated values.
	contents, generated []InputObject
	// readsVersion and readsAPIs are true if a chart can read the Kubernetes version or the API versions of the member.
	readsVersion, readsAPIs bool
	// hasUnknownInputs is true if a change of an input can be detected only by building the bundle again, for example a
	// new chart in a range of versions, or an object on the member if the result of its lookup is not stored.
	hasUnknownInputs bool
}

// composedItems are the bundle items of one feature or one release, with the entries for the status.
type composedItems struct {
	items             []bundle.Item
	releases          []configv1beta1.HelmChartSummary
	unansweredLookups []match.Release
	// unpatchedHooks are the releases with postRenderStrategy nohooks: their hooks are not patched.
	unpatchedHooks []match.Release

	builtInputs
}

// ComposeError is the error of a bundle that could not be built. Reason is the reason of its event, in CamelCase.
type ComposeError struct {
	Reason string
	Err    error
}

// Error returns the text of the wrapped error.
func (e *ComposeError) Error() string { return e.Err.Error() }

// Unwrap returns the wrapped error.
func (e *ComposeError) Unwrap() error { return e.Err }

// withReason returns err as a ComposeError, nil if err is nil.
func withReason(reason string, err error) error {
	if err == nil {
		return nil
	}
	return &ComposeError{Reason: reason, Err: err}
}

// References returns the objects on the hub that the bundles are built from. It omits references that cannot be
// resolved: Compose returns their errors.
func (c *Composer) References(r ComposeRequest) []source.Reference {
	all, _ := manifestReferences(r) // Compose returns the errors
	kustomizations, _ := kustomizationReferences(r)
	charts, _ := chartReferences(r)
	all = slices.Concat(all, kustomizations, charts)
	return append(all, loginReferences(all)...)
}

// manifestReferences returns the references of the feature Resources that can be resolved, and the first error.
func manifestReferences(r ComposeRequest) ([]source.Reference, error) {
	all, first := patchReferences(r)
	for _, ref := range r.Summary.Spec.ClusterProfileSpec.PolicyRefs {
		resolved, err := source.ResolvePolicyRef(ref, r.TemplateContext)
		if err == nil {
			all = append(all, resolved)
		} else if first == nil {
			first = err
		}
	}
	return all, first
}

// Compose builds the bundle of one feature. It returns a phase.TerminalError for an error that only a change by the
// user can correct, and source.ErrNotFound if a source does not exist.
func (c *Composer) Compose(ctx context.Context, r ComposeRequest, feature libv1beta1.FeatureID) (Composition, error) {
	compose, ok := map[libv1beta1.FeatureID]func(context.Context, ComposeRequest) (composedItems, error){
		libv1beta1.FeatureResources: c.composeManifests,
		libv1beta1.FeatureHelm:      c.composeReleases,
		libv1beta1.FeatureKustomize: c.composeKustomizations,
	}[feature]
	if !ok {
		return Composition{}, withReason(status.ReasonUnsupported, phase.TerminalErrorf("feature %s is not supported yet", feature))
	}
	account, err := r.account()
	if err != nil {
		return Composition{}, withReason(status.ReasonUnsupported, err)
	}
	if r.changes, err = c.loadChanges(ctx, r); err != nil {
		return Composition{}, err
	}
	composed, err := compose(ctx, r)
	if err == nil {
		composed, err = c.applyChanges(r.changes, composed)
	}
	if err != nil {
		return Composition{}, err
	}
	if err := r.checkItems(composed.items); err != nil {
		return Composition{}, withReason(status.ReasonRender, err)
	}
	markSensitive(composed.items, r.TemplateContext)
	spec := r.Summary.Spec.ClusterProfileSpec
	composition := Composition{Feature: feature, Releases: composed.releases, UnansweredLookups: composed.unansweredLookups, builtInputs: composed.builtInputs, Bundle: bundle.Bundle{
		ID:    bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: r.Summary.Name, Feature: string(feature)},
		Owner: r.Owner,
		Items: composed.items,
		Options: bundle.Options{
			ContinueOnConflict: spec.ContinueOnConflict,
			ContinueOnError:    spec.ContinueOnError,
			CorrectDrift:       spec.SyncMode != configv1beta1.SyncModeOneTime,
			DriftExclusions:    spec.DriftExclusions,
			ServiceAccount:     account,
		},
		SharedBy: r.SharedBy,
		Hub:      c.HubUID,
	}}
	if composition.Digest, err = composition.Bundle.Digest(); err != nil {
		return Composition{}, withReason(status.ReasonRender, phase.TerminalError{Err: err})
	}
	composition.Bundle.KnownDigest = composition.Digest
	return composition, nil
}

// checkObjects returns a phase.TerminalError if a bundle has more than kube.MaxObjects objects, or if these have more
// than kube.MaxValues values.
func checkObjects(items []bundle.Item) error {
	count, values := 0, 0
	for _, item := range items {
		count += len(item.Objects)
		values += item.Documents.CountValues()
	}
	if values > kube.MaxValues {
		return phase.TerminalErrorf("the objects have more than %d values, and a cluster gets at most as many per feature of a profile", kube.MaxValues)
	}
	if count > kube.MaxObjects {
		return phase.TerminalErrorf("there are %d objects, and a cluster gets at most %d per feature of a profile", count, kube.MaxObjects)
	}
	return nil
}

// composeManifests reads and renders policyRefs: by tier, then in list order.
func (c *Composer) composeManifests(ctx context.Context, r ComposeRequest) (composedItems, error) {
	refs := slices.Clone(r.Summary.Spec.ClusterProfileSpec.PolicyRefs)
	slices.SortStableFunc(refs, func(a, b libv1beta1.PolicyRef) int { return cmp.Compare(tierOrDefault(a.Tier), tierOrDefault(b.Tier)) })
	var items []bundle.Item
	var contents []InputObject
	tiers := map[kube.Ref]int32{}
	for _, ref := range refs {
		content, err := c.Contents.Manifests(ctx, ref, r.TemplateContext)
		if err != nil {
			return composedItems{}, withReason(status.ReasonSource, err)
		}
		contents = append(contents, InputObject{Reference: content.Reference, Version: content.Version})
		objects, documents, err := c.Manifests.Render(content, r.TemplateContext)
		if err != nil {
			return composedItems{}, withReason(status.ReasonRender, err)
		}
		if err := r.TemplateContext.Memory.AddDocuments(documents); err != nil {
			return composedItems{}, withReason(status.ReasonRender, fmt.Errorf("%s: %w", content.Reference, err))
		}
		objects = withoutOverridden(objects, tierOrDefault(ref.Tier), tiers)
		if len(objects) == 0 {
			continue
		}
		kind, namespace, name := content.Reference.Origin()
		items = append(items, bundle.Item{
			Objects:               objects,
			Documents:             documents,
			Reference:             bundle.Reference{Kind: kind, Namespace: namespace, Name: name, Tier: tierOrDefault(ref.Tier)},
			Sensitive:             content.Sensitive || render.HasSecret(objects),
			OnlySecretsPrivate:    !content.Sensitive,
			SkipNamespaceCreation: ref.SkipNamespaceCreation,
			Force:                 ref.Force,
			Subresources:          content.Subresources,
		})
		if err := checkObjects(items); err != nil { // before more is decoded
			return composedItems{}, withReason(status.ReasonRender, err)
		}
	}
	return composedItems{items: items, builtInputs: builtInputs{contents: contents}}, nil
}

// withoutOverridden returns the objects of a reference that no former reference with a lower tier contains. tiers has
// the tier of each object of the former references; the returned objects are added to it. Duplicates within one tier
// stay, so that the member reports the conflict. It does not change the slice objects.
func withoutOverridden(objects []*unstructured.Unstructured, tier int32, tiers map[kube.Ref]int32) []*unstructured.Unstructured {
	kept := make([]*unstructured.Unstructured, 0, len(objects))
	for _, obj := range objects {
		key := kube.RefOf(obj).Key()
		if other, ok := tiers[key]; ok && other < tier {
			continue
		}
		tiers[key] = tier
		kept = append(kept, obj)
	}
	if len(kept) == len(objects) {
		return objects
	}
	return kept
}

func tierOrDefault(t int32) int32 { return cmp.Or(t, bundle.DefaultTier) }
