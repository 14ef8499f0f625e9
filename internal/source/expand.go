package source

import (
	"fmt"
	"maps"
	"slices"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// ExpandChart expands the templates in the fields of chart, except for the values, see render.Values. Errors are
// phase.TerminalError and name the field.
func ExpandChart(chart configv1beta1.HelmChart, tmplCtx TemplateContext) (configv1beta1.HelmChart, error) {
	release := chart.ReleaseNamespace + "/" + chart.ReleaseName
	// The order is fixed, so that the same problem has the same message.
	for _, field := range []struct {
		name string
		text *string
	}{
		{"repositoryURL", &chart.RepositoryURL},
		{"repositoryName", &chart.RepositoryName},
		{"chartName", &chart.ChartName},
		{"chartVersion", &chart.ChartVersion},
		{"releaseName", &chart.ReleaseName},
		{"releaseNamespace", &chart.ReleaseNamespace},
	} {
		expanded, err := tmplCtx.Expand(field.name, *field.text)
		if err != nil {
			return configv1beta1.HelmChart{}, fmt.Errorf("release %s: %w", release, err)
		}
		*field.text = expanded
	}
	options, err := expandOptions(chart.Options, tmplCtx)
	if err != nil {
		return configv1beta1.HelmChart{}, fmt.Errorf("release %s: %w", release, err)
	}
	chart.Options = options
	return chart, nil
}

// expandOptions returns options with the description and the labels expanded.
func expandOptions(options *configv1beta1.HelmOptions, tmplCtx TemplateContext) (*configv1beta1.HelmOptions, error) {
	if options == nil {
		return nil, nil //nolint:nilnil // there are no options
	}
	expanded := *options // the options are in the informer cache
	var err error
	if expanded.Description, err = tmplCtx.Expand("options.description", options.Description); err != nil {
		return nil, err
	}
	expanded.Labels = maps.Clone(options.Labels)
	for _, name := range slices.Sorted(maps.Keys(options.Labels)) {
		if expanded.Labels[name], err = tmplCtx.Expand("options.labels."+name, options.Labels[name]); err != nil {
			return nil, err
		}
	}
	return &expanded, nil
}
