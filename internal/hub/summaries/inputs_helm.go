package summaries

import (
	"cmp"
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// HelmInputs are the inputs that only the feature Helm has. The archive of a chart with an exact version is not an
// input, since it does not change. The revision and the operation of a release are not inputs, since they change only
// with another input or for an outdated release (nextRevision). The bundle is built again after a change of any field.
type HelmInputs struct {
	// KubernetesVersion and APIVersions are fields of the member. Each is empty if no chart can read it: then a new kind
	// on the member does not change the digest.
	KubernetesVersion string   `json:",omitempty"`
	APIVersions       []string `json:",omitempty"`
	// Conflicts are the releases that other summaries manage.
	Conflicts []match.Conflict `json:",omitempty"`
	// Generated are the Secrets with generated values and results of lookup. Version is empty if the Secret does not
	// exist. Users delete such a Secret to generate new values.
	Generated []InputObject `json:",omitempty"`
	// Releases are the releases in the status of the summary: the bundle is built again to restore lost or edited entries.
	Releases []configv1beta1.HelmChartSummary `json:",omitempty"`
}

// helmInputsOf returns the inputs of a summary's Helm releases.
func (c *Controller) helmInputsOf(ctx context.Context, s *state, r ComposeRequest) (*HelmInputs, error) {
	inputs := &HelmInputs{
		KubernetesVersion: r.Member.KubernetesVersion, APIVersions: r.Member.APIVersions, Conflicts: r.Conflicts,
		Releases: s.summary.Status.HelmReleaseSummaries,
	}
	for _, reference := range generatedReferences(r) {
		object, err := c.readMetadata(ctx, reference)
		if err != nil {
			return nil, err
		}
		inputs.Generated = append(inputs.Generated, InputObject{Reference: reference, UID: object.UID, Version: object.ResourceVersion})
	}
	return inputs, nil
}

// afterBuild returns the inputs after the bundle was built: without the versions that its charts do not read, with its
// releases, and with the new versions of the Secrets with generated values, which the cache may not have yet.
func (i *HelmInputs) afterBuild(built Composition) *HelmInputs {
	inputs := *i
	if !built.readsVersion {
		inputs.KubernetesVersion = ""
	}
	if !built.readsAPIs {
		inputs.APIVersions = nil
	}
	inputs.Generated = slices.Clone(i.Generated)
	for _, used := range built.generated {
		index := slices.IndexFunc(inputs.Generated, func(known InputObject) bool { return known.Reference == used.Reference })
		if index >= 0 {
			inputs.Generated[index] = used
		}
	}
	inputs.Releases = status.SortReleases(built.Releases)
	return &inputs
}

// variants returns the inputs for charts that read the Kubernetes version and the API versions, only the Kubernetes
// version, or neither. Only a build shows which of them applies, so the digest of the delivered bundle is compared with
// all three. A chart that reads the API versions counts as a chart that reads both.
func (i *HelmInputs) variants() []*HelmInputs {
	versionOnly := *i
	versionOnly.APIVersions = nil
	none := versionOnly
	none.KubernetesVersion = ""
	return []*HelmInputs{i, &versionOnly, &none}
}

// chartReferences returns the references of the feature Helm that can be resolved, and the first error.
func chartReferences(r ComposeRequest) ([]source.Reference, error) {
	all, first := patchReferences(r)
	add := func(ref source.Reference, err error) {
		if err == nil {
			all = append(all, ref)
		}
		first = cmp.Or(first, err)
	}
	for _, chart := range r.Summary.Spec.ClusterProfileSpec.HelmCharts {
		if ref, _, err := source.ResolveChartSource(chart, r.TemplateContext); ref.IsFlux() || err != nil {
			add(ref, err)
		}
		for _, ref := range chart.ValuesFrom {
			add(source.ResolveValueFrom(ref, r.TemplateContext))
		}
		if login := chart.RegistryCredentialsConfig; login != nil {
			for _, ref := range []*corev1.SecretReference{login.Credentials, login.CA} {
				if ref != nil {
					add(source.ResolveSecretRef(*ref, r.TemplateContext))
				}
			}
		}
		for _, ref := range source.VerificationSecrets(chart) {
			add(source.ResolveSecretRef(ref, r.TemplateContext))
		}
	}
	return all, first
}

// merge returns the inputs of b and other together.
func (b builtInputs) merge(other builtInputs) builtInputs {
	return builtInputs{
		contents:         slices.Concat(b.contents, other.contents),
		generated:        slices.Concat(b.generated, other.generated),
		readsVersion:     b.readsVersion || other.readsVersion,
		readsAPIs:        b.readsAPIs || other.readsAPIs,
		hasUnknownInputs: b.hasUnknownInputs || other.hasUnknownInputs,
	}
}
