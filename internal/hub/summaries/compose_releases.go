package summaries

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/client-go/rest"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// composeReleases fetches and renders helmCharts in the order of the list, without the charts to uninstall.
func (c *Composer) composeReleases(ctx context.Context, r ComposeRequest) (composedItems, error) {
	charts, err := expandChartNames(r.Summary.Spec.ClusterProfileSpec.HelmCharts, r.TemplateContext)
	if err == nil {
		err = checkDuplicateReleases(charts)
	}
	if err != nil {
		return composedItems{}, withReason(status.ReasonRender, err)
	}
	var all composedItems
	for _, chart := range r.Summary.Spec.ClusterProfileSpec.HelmCharts {
		if chart.HelmChartAction == configv1beta1.HelmChartActionUninstall {
			continue
		}
		composed, err := c.composeRelease(ctx, r, chart)
		if err != nil {
			return composedItems{}, fmt.Errorf("helm release %s/%s: %w", chart.ReleaseNamespace, chart.ReleaseName, err)
		}
		all.items = append(all.items, composed.items...)
		all.releases = append(all.releases, composed.releases...)
		all.unansweredLookups = append(all.unansweredLookups, composed.unansweredLookups...)
		all.unpatchedHooks = append(all.unpatchedHooks, composed.unpatchedHooks...)
		all.builtInputs = all.merge(composed.builtInputs)
		if err := checkObjects(all.items); err != nil { // before more is decoded
			return composedItems{}, withReason(status.ReasonRender, err)
		}
	}
	return all, nil
}

// composeRelease fetches and renders one chart of the spec.
func (c *Composer) composeRelease(ctx context.Context, r ComposeRequest, chart configv1beta1.HelmChart) (composedItems, error) {
	expanded, err := source.ExpandChart(chart, r.TemplateContext)
	if err != nil {
		return composedItems{}, withReason(status.ReasonRender, err)
	}
	options, err := releaseOptions(expanded.Options)
	if err != nil {
		return composedItems{}, withReason(status.ReasonRender, err)
	}
	archive, contents, err := c.fetchChart(ctx, r, expanded)
	if err != nil {
		return composedItems{}, withReason(status.ReasonSource, err)
	}
	values, err := render.Values(expanded.Values, contents, r.TemplateContext)
	if err != nil {
		return composedItems{}, withReason(status.ReasonRender, err)
	}
	encoded, err := encodeValues(values)
	if err != nil {
		return composedItems{}, withReason(status.ReasonRender, err)
	}
	release, rendered, inputs, err := c.renderRelease(ctx, r, expanded, chartRequest(r, expanded, archive, values))
	if err != nil {
		return composedItems{}, withReason(status.ReasonRender, err)
	}
	release.Options = options
	release.Data.Values = encoded
	// Generated values can be passwords, and lookup can read Secrets of the member.
	isSensitive := rendered.MemberSpecific || slices.ContainsFunc(contents, func(c source.Content) bool { return c.Sensitive })
	item := bundle.Item{
		Objects:               rendered.Objects,
		Documents:             rendered.Documents,
		Release:               &release,
		Sensitive:             isSensitive || render.HasSecret(rendered.Objects),
		OnlySecretsPrivate:    !isSensitive,
		SkipNamespaceCreation: !createsNamespace(expanded),
		Force:                 isForced(expanded.Options),
	}
	all := composedItems{items: []bundle.Item{item}, releases: []configv1beta1.HelmChartSummary{c.releaseSummary(expanded, archive, encoded)}, builtInputs: inputs}
	if expanded.Options != nil && expanded.Options.PostRenderStrategy == configv1beta1.PostRenderNoHooks {
		all.unpatchedHooks = []match.Release{{Namespace: release.Namespace, Name: release.Name}}
	}
	if rendered.Unanswered {
		all.unansweredLookups = []match.Release{{Namespace: release.Namespace, Name: release.Name}}
	}
	return all, nil
}

// renderRelease renders a chart and stores its generated values. It returns the release without options and values.
func (c *Composer) renderRelease(
	ctx context.Context, r ComposeRequest, chart configv1beta1.HelmChart, request render.ChartRequest,
) (next bundle.Release, rendered render.Release, inputs builtInputs, err error) {
	release := match.Release{Namespace: chart.ReleaseNamespace, Name: chart.ReleaseName}
	inputsDigest, err := c.Renderer.InputsDigest(request)
	if err == nil {
		inputsDigest, err = inputsDigestWithChanges(inputsDigest, r.changes)
	}
	if err != nil {
		return bundle.Release{}, render.Release{}, builtInputs{}, err
	}
	if inputsDigest != "" {
		if request.Revision, request.IsUpgrade, err = c.nextRevision(ctx, r, release, inputsDigest); err != nil {
			return bundle.Release{}, render.Release{}, builtInputs{}, err
		}
	}
	store := c.newGeneratedStore(r, release)
	request.Owner = store.key().String()
	request.Generated = store.load
	account, err := r.account()
	if err != nil {
		return bundle.Release{}, render.Release{}, builtInputs{}, err
	}
	request.Lookup, request.LookupAccount = c.lookupFunc(ctx, r.Member, account), account
	if rendered, err = c.Renderer.Render(ctx, request); err == nil {
		err = request.Memory.AddDocuments(rendered.Documents)
	}
	if err != nil {
		return bundle.Release{}, render.Release{}, builtInputs{}, err
	}
	if err := store.save(ctx, renderingID(inputsDigest, request.Revision, request.IsUpgrade), rendered.Generated); err != nil {
		return bundle.Release{}, render.Release{}, builtInputs{}, err
	}
	if inputs, err = c.releaseInputs(chart, request, rendered); err != nil {
		return bundle.Release{}, render.Release{}, builtInputs{}, err
	}
	archive := request.Chart
	next = bundle.Release{
		Name: chart.ReleaseName, Namespace: chart.ReleaseNamespace, RepoURL: chart.RepositoryURL,
		ChartName: archive.Name, ChartVersion: archive.Version, AppVersion: archive.AppVersion, Icon: archive.Icon,
		Inputs: inputsDigest, Revision: request.Revision, IsUpgrade: request.IsUpgrade,
		Data: bundle.ReleaseData{Chart: rendered.Chart, Defaults: rendered.Defaults, Notes: rendered.Notes, Paths: rendered.Paths},
	}
	next.IsUnconfirmed = inputsDigest != "" && !isConfirmed(r, next)
	return next, rendered, store.addInputs(inputs), nil
}

// releaseInputs returns the inputs of a release that are known only after it is rendered, without the generated values.
func (c *Composer) releaseInputs(chart configv1beta1.HelmChart, request render.ChartRequest, rendered render.Release) (inputs builtInputs, err error) {
	if request.Chart.Artifact != "" { // the chart is from a Flux source
		inputs.contents = []InputObject{{Reference: request.Chart.Source, Version: request.Chart.Artifact}}
	} else {
		inputs.hasUnknownInputs = !source.IsExactVersion(chart.ChartVersion)
	}
	inputs.hasUnknownInputs = inputs.hasUnknownInputs || rendered.IsTransient
	inputs.readsVersion, inputs.readsAPIs, err = c.Renderer.ReadsCapabilities(request)
	return inputs, err
}

// lookupFunc returns the function that reads objects of m as the ServiceAccount account, or as the hub if account is
// "". It returns nil if the hub cannot connect to m. A chart must not read more than the ServiceAccount may, since it
// can copy an object that it reads into the objects that it deploys.
func (c *Composer) lookupFunc(ctx context.Context, m fleet.Member, account string) render.LookupFunc {
	if c.MemberConfig[m.Mode] == nil {
		return nil
	}
	return func(apiVersion, kind, namespace, name string) (map[string]any, error) {
		config, err := c.memberConfig(ctx, m)
		if err != nil {
			return nil, err
		}
		if account != "" {
			if config.Impersonate.UserName, err = bundle.ServiceAccountUser(account); err != nil {
				return nil, err
			}
		}
		return engine.NewLookupFunction(config)(apiVersion, kind, namespace, name)
	}
}

// memberConfig returns the REST config of a member whose mode is in MemberConfig, with lookupTimeout.
func (c *Composer) memberConfig(ctx context.Context, m fleet.Member) (*rest.Config, error) {
	config, err := c.MemberConfig[m.Mode](ctx, m)
	if err != nil {
		return nil, err
	}
	config = rest.CopyConfig(config)
	config.Timeout = lookupTimeout
	return config, nil
}

// fetchChart returns the chart and the content of its valuesFrom.
func (c *Composer) fetchChart(ctx context.Context, r ComposeRequest, chart configv1beta1.HelmChart) (source.Chart, []source.Content, error) {
	var contents []source.Content
	for _, ref := range chart.ValuesFrom {
		content, err := c.Contents.Values(ctx, ref, r.TemplateContext)
		if err != nil {
			return source.Chart{}, nil, err
		}
		contents = append(contents, content)
	}
	if source.IsFluxURL(chart.RepositoryURL) {
		archive, err := c.fetchFluxChart(ctx, r, chart)
		return archive, contents, err
	}
	login, err := source.LoginFor(ctx, c.Objects, chart, r.TemplateContext)
	if err != nil {
		return source.Chart{}, nil, err
	}
	verification, err := source.VerificationFor(ctx, c.Objects, chart, r.TemplateContext)
	if err != nil {
		return source.Chart{}, nil, err
	}
	archive, err := c.Charts.Fetch(ctx, chart, login, verification, func() string { return specDigest(r.Summary) })
	return archive, contents, err
}

func chartRequest(r ComposeRequest, chart configv1beta1.HelmChart, archive source.Chart, values map[string]any) render.ChartRequest {
	request := render.ChartRequest{
		Chart: archive, Values: values, Name: chart.ReleaseName, Namespace: chart.ReleaseNamespace,
		KubeVersion: r.Member.KubernetesVersion, APIVersions: r.Member.APIVersions, Scope: r.TemplateContext.RestrictedNamespace, Memory: r.TemplateContext.Memory,
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

// createsNamespace returns the option installOptions.createNamespace, which defaults to true.
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
		return nil, phase.TerminalError{Err: fmt.Errorf("encode values: %w", err)}
	}
	return raw, nil
}

func (c *Composer) releaseSummary(chart configv1beta1.HelmChart, archive source.Chart, values []byte) configv1beta1.HelmChartSummary {
	summary := configv1beta1.HelmChartSummary{
		ReleaseName: chart.ReleaseName, ReleaseNamespace: chart.ReleaseNamespace, Status: configv1beta1.HelmChartStatusManaging,
		ValuesHash: c.HashKey.Hash(values), ChartName: archive.Name, RepositoryName: chart.RepositoryName, RepoURL: chart.RepositoryURL, ChartVersion: archive.Version,
	}
	if chart.RegistryCredentialsConfig != nil {
		summary.CredentialsSecretRef = chart.RegistryCredentialsConfig.Credentials
	}
	return summary
}
