package summaries

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"helm.sh/helm/v4/pkg/engine"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// lookupTimeout bounds one request of a chart's lookup to a member.
const lookupTimeout = 10 * time.Second

// Composer builds bundles: it reads the sources of a profile and renders them for one member.
type Composer struct {
	// Contents reads ConfigMaps and Secrets of the hub.
	Contents client.Reader
	// Hub reads and writes the Secrets with the values that charts generate, at the API server.
	Hub client.Client
	// Charts fetches charts; Renderer renders them.
	Charts   *source.Charts
	Renderer *render.Charts
	// Dial returns the REST config of a member, by mode. Charts that look up objects or read the revision need it. For a
	// mode without an entry lookup finds only Secrets and ConfigMaps of the release.
	Dial map[fleet.Mode]func(ctx context.Context, m fleet.Member) (*rest.Config, error)
	// ListDeployed lists the bundles of a member, see deliver.Transport.
	ListDeployed func(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error)
	// HubUID is the UID of the hub's namespace kube-system. Every bundle has it.
	HubUID string
}

// Request has the inputs of the bundles of one summary.
type Request struct {
	Summary  *configv1beta1.ClusterSummary
	Member   fleet.Member
	Subject  source.Subject
	Owner    bundle.Owner
	Audience int
	// Deployed are the Helm releases of the summary that the member has.
	Deployed []bundle.DeployedRelease
	// State is the state of the Helm bundle on the member, "" if it is not known.
	State bundle.State
	// Outdated is bundle.Report.Outdated of the Helm bundle on the member.
	Outdated []bundle.OutdatedRelease
	// Lost are the releases of the summary that another summary manages.
	Lost []match.Contest
	// EnsureFinalizer adds the finalizer to the summary. It is called before generated values are stored: without the
	// finalizer they would stay on the hub after the deletion of the summary.
	EnsureFinalizer func(ctx context.Context) error
}

// Composition is the bundle of one feature, with the fields of the summary's status that describe it.
type Composition struct {
	Feature  libv1beta1.FeatureID
	Bundle   bundle.Bundle
	Digest   bundle.Digest
	Releases []configv1beta1.HelmChartSummary
	// Unanswered are the releases whose charts look up objects of a member that the hub cannot read.
	Unanswered []match.Release
}

// renderedFeature are the items of one feature, with their releases.
type renderedFeature struct {
	items      []bundle.Item
	releases   []configv1beta1.HelmChartSummary
	unanswered []match.Release
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

func withReason(reason string, err error) error {
	if err == nil {
		return nil
	}
	return &ComposeError{Reason: reason, Err: err}
}

// References returns the hub's objects that the bundles are built from. References that cannot be resolved are left
// out: Compose returns their errors.
func (c *Composer) References(r Request) []source.Reference {
	spec := r.Summary.Spec.ClusterProfileSpec
	var all []source.Reference
	add := func(ref source.Reference, err error) {
		if err == nil {
			all = append(all, ref)
		}
	}
	for _, ref := range spec.PolicyRefs {
		add(source.ManifestsReference(ref, r.Subject))
	}
	for _, chart := range spec.HelmCharts {
		for _, ref := range chart.ValuesFrom {
			add(source.ValuesReference(ref, r.Subject))
		}
		if login := chart.RegistryCredentialsConfig; login != nil {
			for _, ref := range []*corev1.SecretReference{login.Credentials, login.CA} {
				if ref != nil {
					add(source.LoginReference(*ref, r.Subject))
				}
			}
		}
		for _, ref := range source.VerificationSecrets(chart) {
			add(source.LoginReference(ref, r.Subject))
		}
	}
	return all
}

// Compose builds the bundle of one feature. It returns a phase.Invalid if the user must change an input, and
// source.ErrNotFound if a source does not exist.
func (c *Composer) Compose(ctx context.Context, r Request, feature libv1beta1.FeatureID) (Composition, error) {
	compose, ok := map[libv1beta1.FeatureID]func(context.Context, Request) (renderedFeature, error){
		libv1beta1.FeatureResources: c.manifests,
		libv1beta1.FeatureHelm:      c.releases,
	}[feature]
	if !ok {
		return Composition{}, withReason(status.ReasonUnsupported, phase.Invalidf("feature %s is not supported yet", feature))
	}
	parts, err := compose(ctx, r)
	if err != nil {
		return Composition{}, err
	}
	spec := r.Summary.Spec.ClusterProfileSpec
	made := Composition{Feature: feature, Releases: parts.releases, Unanswered: parts.unanswered, Bundle: bundle.Bundle{
		ID:    bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: r.Summary.Name, Feature: string(feature)},
		Owner: r.Owner,
		Items: parts.items,
		Options: bundle.Options{
			ContinueOnConflict: spec.ContinueOnConflict,
			ContinueOnError:    spec.ContinueOnError,
			CorrectDrift:       spec.SyncMode != configv1beta1.SyncModeOneTime,
		},
		SharedBy: r.Audience,
		Hub:      c.HubUID,
	}}
	if made.Digest, err = made.Bundle.Digest(); err != nil {
		return Composition{}, withReason(status.ReasonRender, phase.Invalid{Err: err})
	}
	return made, nil
}

// manifests reads and renders policyRefs: by tier, then in list order.
func (c *Composer) manifests(ctx context.Context, r Request) (renderedFeature, error) {
	refs := slices.Clone(r.Summary.Spec.ClusterProfileSpec.PolicyRefs)
	slices.SortStableFunc(refs, func(a, b libv1beta1.PolicyRef) int { return cmp.Compare(tier(a.Tier), tier(b.Tier)) })
	var items []bundle.Item
	tiers := map[kube.Ref]int32{}
	for _, ref := range refs {
		content, err := source.Manifests(ctx, c.Contents, ref, r.Subject)
		if err != nil {
			return renderedFeature{}, withReason(status.ReasonSource, err)
		}
		objects, err := render.Manifests(content, r.Subject)
		if err != nil {
			return renderedFeature{}, withReason(status.ReasonRender, err)
		}
		objects = withoutOverridden(objects, tier(ref.Tier), tiers)
		if len(objects) == 0 {
			continue
		}
		items = append(items, bundle.Item{
			Objects: objects,
			Reference: bundle.Reference{
				Kind: content.Reference.Kind, Namespace: content.Reference.Namespace, Name: content.Reference.Name, Tier: tier(ref.Tier),
			},
			Sensitive:             content.Sensitive || render.HasSecret(objects),
			SkipNamespaceCreation: ref.SkipNamespaceCreation,
			Force:                 ref.Force,
		})
	}
	return renderedFeature{items: items}, nil
}

// withoutOverridden omits the objects that a reference of a lower tier has, too. Duplicates of the same tier stay, so
// that the member reports the conflict.
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
	return kept
}

func tier(t int32) int32 { return cmp.Or(t, bundle.DefaultTier) }

// releases fetches and renders helmCharts in the order of the list, without those to uninstall.
func (c *Composer) releases(ctx context.Context, r Request) (renderedFeature, error) {
	if err := checkDistinct(resolveCharts(r.Summary.Spec.ClusterProfileSpec.HelmCharts, r.Subject)); err != nil {
		return renderedFeature{}, withReason(status.ReasonRender, err)
	}
	var all renderedFeature
	for _, chart := range r.Summary.Spec.ClusterProfileSpec.HelmCharts {
		if chart.HelmChartAction == configv1beta1.HelmChartActionUninstall {
			continue
		}
		one, err := c.release(ctx, r, chart)
		if err != nil {
			return renderedFeature{}, fmt.Errorf("helm release %s/%s: %w", chart.ReleaseNamespace, chart.ReleaseName, err)
		}
		all.items = append(all.items, one.items...)
		all.releases = append(all.releases, one.releases...)
		all.unanswered = append(all.unanswered, one.unanswered...)
	}
	return all, nil
}

func (c *Composer) release(ctx context.Context, r Request, chart configv1beta1.HelmChart) (renderedFeature, error) {
	expanded, err := source.ExpandChart(chart, r.Subject)
	if err != nil {
		return renderedFeature{}, withReason(status.ReasonRender, err)
	}
	options, err := releaseOptions(expanded.Options)
	if err != nil {
		return renderedFeature{}, withReason(status.ReasonRender, err)
	}
	archive, contents, err := c.fetch(ctx, r, expanded)
	if err != nil {
		return renderedFeature{}, withReason(status.ReasonSource, err)
	}
	values, err := render.Values(expanded.Values, contents, r.Subject)
	if err != nil {
		return renderedFeature{}, withReason(status.ReasonRender, err)
	}
	encoded, err := encodeValues(values)
	if err != nil {
		return renderedFeature{}, withReason(status.ReasonRender, err)
	}
	release, rendered, err := c.render(ctx, r, expanded, chartRequest(r, expanded, archive, values))
	if err != nil {
		return renderedFeature{}, withReason(status.ReasonRender, err)
	}
	release.Options = options
	release.Data.Values = encoded
	sensitive := rendered.MemberSpecific || render.HasSecret(rendered.Objects) || slices.ContainsFunc(contents, func(c source.Content) bool { return c.Sensitive })
	item := bundle.Item{
		Objects:               rendered.Objects,
		Release:               &release,
		Sensitive:             sensitive,
		SkipNamespaceCreation: !createsNamespace(expanded),
		Force:                 isForced(expanded.Options),
	}
	all := renderedFeature{items: []bundle.Item{item}, releases: []configv1beta1.HelmChartSummary{releaseSummary(expanded, archive, encoded)}}
	if rendered.Unanswered {
		all.unanswered = []match.Release{{Namespace: release.Namespace, Name: release.Name}}
	}
	return all, nil
}

// render renders a chart, and stores its generated values.
func (c *Composer) render(ctx context.Context, r Request, chart configv1beta1.HelmChart, request render.ChartRequest) (bundle.Release, render.Release, error) {
	release := match.Release{Namespace: chart.ReleaseNamespace, Name: chart.ReleaseName}
	inputs, err := c.Renderer.Inputs(request)
	if err != nil {
		return bundle.Release{}, render.Release{}, err
	}
	if inputs != "" {
		if request.Revision, request.IsUpgrade, err = c.nextRevision(ctx, r, release, inputs); err != nil {
			return bundle.Release{}, render.Release{}, err
		}
	}
	store := c.newGeneratedStore(r, release)
	request.Owner = store.key().String()
	request.Generated = store.load
	request.Lookup = c.lookupFunc(ctx, r.Member)
	rendered, err := c.Renderer.Render(ctx, request)
	if err != nil {
		return bundle.Release{}, render.Release{}, err
	}
	if err := store.save(ctx, renderingID(inputs, request.Revision, request.IsUpgrade), rendered.Generated); err != nil {
		return bundle.Release{}, render.Release{}, err
	}
	archive := request.Chart
	made := bundle.Release{
		Name: chart.ReleaseName, Namespace: chart.ReleaseNamespace, RepoURL: chart.RepositoryURL,
		ChartName: archive.Name, ChartVersion: archive.Version, AppVersion: archive.AppVersion, Icon: archive.Icon,
		Inputs: inputs, Revision: request.Revision, IsUpgrade: request.IsUpgrade,
		Data: bundle.ReleaseData{Chart: rendered.Chart, Defaults: rendered.Defaults, Notes: rendered.Notes, Paths: rendered.Paths},
	}
	made.IsUnconfirmed = inputs != "" && !isConfirmed(r, made)
	return made, rendered, nil
}

// lookupFunc returns the function that reads objects of m, nil if the hub cannot connect to m.
func (c *Composer) lookupFunc(ctx context.Context, m fleet.Member) render.LookupFunc {
	if c.Dial[m.Mode] == nil {
		return nil
	}
	return func(apiVersion, kind, namespace, name string) (map[string]any, error) {
		config, err := c.dial(ctx, m)
		if err != nil {
			return nil, err
		}
		return engine.NewLookupFunction(config)(apiVersion, kind, namespace, name)
	}
}

// dial returns the REST config of a member whose mode is in Dial, with lookupTimeout.
func (c *Composer) dial(ctx context.Context, m fleet.Member) (*rest.Config, error) {
	config, err := c.Dial[m.Mode](ctx, m)
	if err != nil {
		return nil, err
	}
	config = rest.CopyConfig(config)
	config.Timeout = lookupTimeout
	return config, nil
}

// fetch returns the chart and the objects of its valuesFrom.
func (c *Composer) fetch(ctx context.Context, r Request, chart configv1beta1.HelmChart) (source.Chart, []source.Content, error) {
	var contents []source.Content
	for _, ref := range chart.ValuesFrom {
		content, err := source.Values(ctx, c.Contents, ref, r.Subject)
		if err != nil {
			return source.Chart{}, nil, err
		}
		contents = append(contents, content)
	}
	login, err := source.LoginFor(ctx, c.Contents, chart, r.Subject)
	if err != nil {
		return source.Chart{}, nil, err
	}
	verification, err := source.VerificationFor(ctx, c.Contents, chart, r.Subject)
	if err != nil {
		return source.Chart{}, nil, err
	}
	archive, err := c.Charts.Fetch(ctx, chart, login, verification)
	return archive, contents, err
}

func chartRequest(r Request, chart configv1beta1.HelmChart, archive source.Chart, values map[string]any) render.ChartRequest {
	request := render.ChartRequest{
		Chart: archive, Values: values, Name: chart.ReleaseName, Namespace: chart.ReleaseNamespace,
		KubeVersion: r.Member.KubernetesVersion, APIVersions: r.Member.APIVersions,
	}
	if options := chart.Options; options != nil {
		request.SkipCRDs = options.SkipCRDs
		request.SkipSchemaValidation = options.SkipSchemaValidation
		request.DisableHooks = options.DisableHooks
		if options.UpgradeOptions != nil {
			request.SubNotes = options.UpgradeOptions.SubNotes
		}
	}
	return request
}

// createsNamespace returns installOptions.createNamespace, which defaults to true.
func createsNamespace(chart configv1beta1.HelmChart) bool {
	if chart.Options == nil || chart.Options.InstallOptions == nil || chart.Options.InstallOptions.CreateNamespace == nil {
		return true
	}
	return *chart.Options.InstallOptions.CreateNamespace
}

// encodeValues returns the JSON of values, nil if there are none.
func encodeValues(values map[string]any) (json.RawMessage, error) {
	if len(values) == 0 {
		return nil, nil
	}
	raw, err := json.Marshal(values)
	if err != nil {
		return nil, phase.Invalid{Err: fmt.Errorf("encode values: %w", err)}
	}
	return raw, nil
}

func releaseSummary(chart configv1beta1.HelmChart, archive source.Chart, values []byte) configv1beta1.HelmChartSummary {
	hash := sha256.Sum256(values)
	summary := configv1beta1.HelmChartSummary{
		ReleaseName: chart.ReleaseName, ReleaseNamespace: chart.ReleaseNamespace, Status: configv1beta1.HelmChartStatusManaging,
		ValuesHash: hash[:], ChartName: archive.Name, RepositoryName: chart.RepositoryName, RepoURL: chart.RepositoryURL, ChartVersion: archive.Version,
	}
	if chart.RegistryCredentialsConfig != nil {
		summary.CredentialsSecretRef = chart.RegistryCredentialsConfig.Credentials
	}
	return summary
}

// ownerOf returns the profile of a summary.
func ownerOf(summary *configv1beta1.ClusterSummary) (bundle.Owner, error) {
	controller := metav1.GetControllerOf(summary)
	if controller == nil {
		return bundle.Owner{}, phase.Invalidf("ClusterSummary %s belongs to no profile", client.ObjectKeyFromObject(summary))
	}
	owner := bundle.Owner{Kind: controller.Kind, Name: controller.Name, Tier: tier(summary.Spec.ClusterProfileSpec.Tier)}
	if owner.Kind == configv1beta1.ProfileKind {
		owner.Name = summary.Namespace + "/" + owner.Name
	}
	return owner, nil
}
