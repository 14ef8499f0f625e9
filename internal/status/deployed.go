package status

import (
	"fmt"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// EachDeployedFeature calls visit for each feature in a ClusterConfiguration, with the kind and the name of its
// profile.
func EachDeployedFeature(s configv1beta1.ClusterConfigurationStatus, visit func(kind, profile string, feature configv1beta1.DeployedFeature)) {
	for _, profile := range s.ClusterProfileResources {
		for _, feature := range profile.Features {
			visit(configv1beta1.ClusterProfileKind, profile.ClusterProfileName, feature)
		}
	}
	for _, profile := range s.ProfileResources {
		for _, feature := range profile.Features {
			visit(configv1beta1.ProfileKind, profile.ProfileName, feature)
		}
	}
}

// ListDeployed describes the releases and objects in a ClusterConfiguration, one text for each. It lists the features
// for which isWanted returns true. isWanted is called with the kind and the name of the profile, and with Remote for
// the objects on the cluster and Local for the objects on the hub.
func ListDeployed(
	s configv1beta1.ClusterConfigurationStatus,
	isWanted func(kind, profile string, feature libv1beta1.FeatureID, deploymentType libv1beta1.DeploymentType) bool,
) []string {
	var all []string
	EachDeployedFeature(s, func(kind, profile string, feature configv1beta1.DeployedFeature) {
		if isWanted(kind, profile, feature.FeatureID, libv1beta1.DeploymentTypeRemote) {
			all = append(all, listOnMember(feature)...)
		}
		if isWanted(kind, profile, feature.FeatureID, libv1beta1.DeploymentTypeLocal) {
			for _, resource := range ResourcesOf(feature, libv1beta1.DeploymentTypeLocal) {
				all = append(all, refOfDeployed(resource).String()+" on the hub")
			}
		}
	})
	return all
}

// listOnMember describes the releases and objects of a feature on the member.
func listOnMember(feature configv1beta1.DeployedFeature) []string {
	var all []string
	for _, chart := range feature.Charts {
		all = append(all, fmt.Sprintf("Helm release %s/%s", chart.Namespace, chart.ReleaseName))
	}
	if feature.FeatureID == libv1beta1.FeatureHelm && len(all) > 0 {
		return all // the objects of the releases are not listed
	}
	for _, resource := range ResourcesOf(feature, libv1beta1.DeploymentTypeRemote) {
		all = append(all, refOfDeployed(resource).String())
	}
	return all
}

func refOfDeployed(r configv1beta1.DeployedResource) kube.Ref {
	return kube.Ref{Group: r.Group, Kind: r.Kind, Namespace: r.Namespace, Name: r.Name}
}
