package join

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// deployedOn lists what is deployed on a cluster, for people: its releases and objects.
func deployedOn(ctx context.Context, hub client.Client, r Request) ([]string, error) {
	inventory := &configv1beta1.ClusterConfiguration{}
	err := hub.Get(ctx, client.ObjectKey{Namespace: r.Namespace, Name: "sveltos--" + r.Name}, inventory)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read what is deployed on cluster %s: %w", r.key(), err)
	}
	var all []string
	for _, profile := range inventory.Status.ClusterProfileResources {
		all = append(all, deployedBy(profile.Features)...)
	}
	for _, profile := range inventory.Status.ProfileResources {
		all = append(all, deployedBy(profile.Features)...)
	}
	return all, nil
}

func deployedBy(features []configv1beta1.DeployedFeature) []string {
	var all []string
	for _, feature := range features {
		for _, chart := range feature.Charts {
			all = append(all, fmt.Sprintf("Helm release %s/%s", chart.Namespace, chart.ReleaseName))
		}
		for _, resource := range feature.Resources {
			// The objects of a release go without saying.
			if feature.FeatureID == libv1beta1.FeatureHelm && len(feature.Charts) > 0 {
				break
			}
			all = append(all, kube.Ref{Group: resource.Group, Kind: resource.Kind, Namespace: resource.Namespace, Name: resource.Name}.String())
		}
	}
	return all
}
