package source

import (
	"fmt"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// ExpandChart returns chart with its templates filled in, except for its values: those are expanded where they are merged. Errors are
// phase.Invalid and name the field.
func ExpandChart(chart configv1beta1.HelmChart, subject Subject) (configv1beta1.HelmChart, error) {
	for name, field := range map[string]*string{
		"repositoryURL":    &chart.RepositoryURL,
		"repositoryName":   &chart.RepositoryName,
		"chartName":        &chart.ChartName,
		"chartVersion":     &chart.ChartVersion,
		"releaseName":      &chart.ReleaseName,
		"releaseNamespace": &chart.ReleaseNamespace,
	} {
		expanded, err := subject.Expand(name, *field)
		if err != nil {
			return configv1beta1.HelmChart{}, fmt.Errorf("release %s/%s: %w", chart.ReleaseNamespace, chart.ReleaseName, err)
		}
		*field = expanded
	}
	return chart, nil
}
