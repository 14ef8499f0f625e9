package cli

import (
	"cmp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/status"
)

// addon is one row of `show addons`: an object or a release on a cluster, and the profiles that deployed it.
type addon struct {
	Cluster        string     `json:"cluster"`
	ResourceType   string     `json:"resourceType"`
	Namespace      string     `json:"namespace"`
	Name           string     `json:"name"`
	Version        string     `json:"version"`
	Time           *time.Time `json:"time"`
	DeploymentType string     `json:"deploymentType"`
	Profiles       []string   `json:"profiles"`
}

// chartType is the resource type of a release.
const chartType = "helm chart"

// addonsOf returns one row for each object and release, sorted by cluster, type, namespace and name.
func addonsOf(configurations []configv1beta1.ClusterConfiguration) []addon {
	var rows []addon
	for i := range configurations {
		rows = append(rows, rowsOfCluster(&configurations[i])...)
	}
	return mergeRows(rows)
}

// rowsOfCluster returns one row for each pair of a profile and an object or release.
func rowsOfCluster(c *configv1beta1.ClusterConfiguration) []addon {
	// The name is <type>--<cluster>. Types have no dashes.
	_, cluster, _ := strings.Cut(c.Name, "--")
	var rows []addon
	status.EachDeployedFeature(c.Status, func(kind, profile string, feature configv1beta1.DeployedFeature) {
		for _, row := range rowsOfFeature(feature) {
			row.Cluster, row.Profiles = c.Namespace+"/"+cluster, []string{kind + "/" + profile}
			rows = append(rows, row)
		}
	})
	return rows
}

func rowsOfFeature(feature configv1beta1.DeployedFeature) []addon {
	var rows []addon
	for _, chart := range feature.Charts {
		rows = append(rows, addon{
			ResourceType: chartType, Namespace: chart.Namespace, Name: chart.ReleaseName, Version: chart.ChartVersion,
			Time: timeOf(chart.LastAppliedTime), DeploymentType: deploymentType(libv1beta1.DeploymentTypeRemote),
		})
	}
	for _, resource := range feature.Resources {
		rows = append(rows, addon{
			ResourceType: resource.Group + ":" + resource.Kind, Namespace: resource.Namespace, Name: resource.Name, Version: "N/A",
			Time: timeOf(resource.LastAppliedTime), DeploymentType: deploymentType(resource.DeploymentType),
		})
	}
	return rows
}

// deploymentType returns the text of a column of the table, as in Sveltos.
func deploymentType(t libv1beta1.DeploymentType) string {
	if t == libv1beta1.DeploymentTypeLocal {
		return "Management cluster"
	}
	return "Managed cluster"
}

func timeOf(t *metav1.Time) *time.Time {
	if t == nil {
		return nil
	}
	return &t.Time
}

// mergeRows sorts rows, and merges rows that differ only in the profiles and the time. A merged row has the latest
// time.
func mergeRows(rows []addon) []addon {
	compare := func(a, b addon) int {
		return cmp.Or(cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.ResourceType, b.ResourceType),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Version, b.Version),
			cmp.Compare(a.DeploymentType, b.DeploymentType))
	}
	slices.SortStableFunc(rows, compare)
	merged := []addon{}
	for _, row := range rows {
		if len(merged) == 0 || compare(merged[len(merged)-1], row) != 0 {
			merged = append(merged, row)
			continue
		}
		last := &merged[len(merged)-1]
		last.Profiles = append(last.Profiles, row.Profiles...)
		slices.Sort(last.Profiles)
		last.Profiles = slices.Compact(last.Profiles)
		if last.Time == nil || (row.Time != nil && row.Time.After(*last.Time)) {
			last.Time = row.Time
		}
	}
	return merged
}

// filterRows returns the rows that match the filter.
func (f addonFilter) filterRows(rows []addon) []addon {
	return slices.DeleteFunc(rows, func(row addon) bool {
		isChart := row.ResourceType == chartType
		_, cluster, _ := strings.Cut(row.Cluster, "/")
		return (f.cluster != "" && cluster != f.cluster) ||
			(f.profile != "" && !slices.Contains(row.Profiles, f.profile)) ||
			(f.charts && !f.resources && !isChart) || (f.resources && !f.charts && isChart)
	})
}
