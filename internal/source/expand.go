package source

import (
	"fmt"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// ExpandChart expands the templates in the fields of chart, except for the values, see render.Values. Errors are
// phase.Invalid and name the field.
func ExpandChart(chart configv1beta1.HelmChart, subject Subject) (configv1beta1.HelmChart, error) {
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
		expanded, err := subject.Expand(field.name, *field.text)
		if err != nil {
			return configv1beta1.HelmChart{}, fmt.Errorf("release %s: %w", release, err)
		}
		*field.text = expanded
	}
	return chart, nil
}
