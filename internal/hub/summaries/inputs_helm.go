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

// HelmInputs are the inputs that only the feature Helm has. A chart with an exact version is no input: its archive is
// not requested again. The revision and the operation that templates read are none either: while the other inputs stay,
// they are those of the deployed release. Each field prevents that an outdated bundle or status stays:
type HelmInputs struct {
	// KubernetesVersion and APIVersions are those of the member. Each is empty if no chart can read it, so that a new kind
	// on the member does not invalidate the digest.
	KubernetesVersion string   `json:",omitempty"`
	APIVersions       []string `json:",omitempty"`
	// Conflicts: another summary can begin or cease to manage a release.
	Conflicts []match.Conflict `json:",omitempty"`
	// Generated are the Secrets with generated values and results of lookup, with an empty Version if there is none. Users
	// delete such a Secret to have new values.
	Generated []InputObject `json:",omitempty"`
	// Releases are the entries of the releases in the status of the summary, so that lost and edited ones are written
	// again.
	Releases []configv1beta1.HelmChartSummary `json:",omitempty"`
}

// helmInputsOf returns the inputs of a summary's Helm releases. Releases are those in the status.
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

// of returns the inputs of a bundle that was built from i: with its entries in the status, and with the Secrets that
// its charts have read and written. The cache may not have them yet.
func (i *HelmInputs) of(built Composition) *HelmInputs {
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

// variants returns the inputs for charts that read both the Kubernetes version and the API versions, only the former,
// or none. The delivered bundle was built with one of them. A chart that reads the API versions counts as reading both.
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
		if ref, _, err := source.ResolveChartSource(chart, r.Subject); ref.IsFlux() || err != nil {
			add(ref, err)
		}
		for _, ref := range chart.ValuesFrom {
			add(source.ResolveValueFrom(ref, r.Subject))
		}
		if login := chart.RegistryCredentialsConfig; login != nil {
			for _, ref := range []*corev1.SecretReference{login.Credentials, login.CA} {
				if ref != nil {
					add(source.ResolveSecretRef(*ref, r.Subject))
				}
			}
		}
		for _, ref := range source.VerificationSecrets(chart) {
			add(source.ResolveSecretRef(ref, r.Subject))
		}
	}
	return all, first
}

// with returns the inputs of a bundle with a further release.
func (b builtFrom) with(release builtFrom) builtFrom {
	return builtFrom{
		contents:         slices.Concat(b.contents, release.contents),
		generated:        slices.Concat(b.generated, release.generated),
		readsVersion:     b.readsVersion || release.readsVersion,
		readsAPIs:        b.readsAPIs || release.readsAPIs,
		hasUnknownInputs: b.hasUnknownInputs || release.hasUnknownInputs,
	}
}
