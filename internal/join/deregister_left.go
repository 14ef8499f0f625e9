package join

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

const (
	// AgentLeft describes an agent that stays on its member.
	AgentLeft = "the agent, in namespace " + kube.AgentNamespace
	// maxLeft is how many bytes the list of what is left behind may take: a quarter of what the annotations of an object
	// may.
	maxLeft = 64 << 10
	// moreLeft ends a list that was cut.
	moreLeft = "more than can be listed here"
)

// readDeployed describes the releases and objects that are deployed for a cluster.
func readDeployed(ctx context.Context, hub client.Client, r Request) ([]string, error) {
	inventory := &configv1beta1.ClusterConfiguration{}
	err := hub.Get(ctx, client.ObjectKey{Namespace: r.Namespace, Name: "sveltos--" + r.Name}, inventory)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read what is deployed on cluster %s: %w", r.key(), err)
	}
	return ListDeployed(inventory.Status, func(string, string, libv1beta1.FeatureID, libv1beta1.DeploymentType) bool { return true }), nil
}

// ListDeployed describes the releases and objects in inventory of the features for which wanted returns true. wanted
// gets the kind and the name of the profile, and whether the objects are on the cluster (Remote) or on the hub (Local).
func ListDeployed(
	inventory configv1beta1.ClusterConfigurationStatus,
	wanted func(kind, profile string, feature libv1beta1.FeatureID, on libv1beta1.DeploymentType) bool,
) []string {
	var all []string
	add := func(kind, profile string, features []configv1beta1.DeployedFeature) {
		for _, feature := range features {
			if wanted(kind, profile, feature.FeatureID, libv1beta1.DeploymentTypeRemote) {
				all = append(all, deployedBy(feature)...)
			}
			if wanted(kind, profile, feature.FeatureID, libv1beta1.DeploymentTypeLocal) {
				all = append(all, deployedOnHub(feature)...)
			}
		}
	}
	for _, profile := range inventory.ClusterProfileResources {
		add(configv1beta1.ClusterProfileKind, profile.ClusterProfileName, profile.Features)
	}
	for _, profile := range inventory.ProfileResources {
		add(configv1beta1.ProfileKind, profile.ProfileName, profile.Features)
	}
	return all
}

func deployedBy(feature configv1beta1.DeployedFeature) []string {
	var all []string
	for _, chart := range feature.Charts {
		all = append(all, fmt.Sprintf("Helm release %s/%s", chart.Namespace, chart.ReleaseName))
	}
	for _, resource := range feature.Resources {
		if resource.DeploymentType == libv1beta1.DeploymentTypeLocal {
			continue
		}
		// The objects of a release go without saying.
		if feature.FeatureID == libv1beta1.FeatureHelm && len(feature.Charts) > 0 {
			break
		}
		all = append(all, refOfDeployed(resource).String())
	}
	return all
}

func deployedOnHub(feature configv1beta1.DeployedFeature) []string {
	var all []string
	for _, resource := range feature.Resources {
		if resource.DeploymentType == libv1beta1.DeploymentTypeLocal {
			all = append(all, refOfDeployed(resource).String()+" on the hub")
		}
	}
	return all
}

func refOfDeployed(r configv1beta1.DeployedResource) kube.Ref {
	return kube.Ref{Group: r.Group, Kind: r.Kind, Namespace: r.Namespace, Name: r.Name}
}

// ListLeftBehind describes the objects that the hub has left on the member of a cluster that is deregistered by force.
func ListLeftBehind(cluster client.Object) []string {
	var left []string
	// Other parties can write this annotation.
	if err := json.Unmarshal([]byte(cluster.GetAnnotations()[kube.AnnotationLeftBehind]), &left); err != nil {
		return nil
	}
	return left
}

// RecordLeftBehind adds to the list of ListLeftBehind, before the cluster object is deleted, and returns the updated
// object. It fails with a conflict if cluster has been changed since it was read. A list that is too long is truncated.
func RecordLeftBehind[T client.Object](ctx context.Context, hub client.Client, cluster T, left ...string) (T, error) {
	all := union(ListLeftBehind(cluster), left)
	text, err := json.Marshal(all)
	for err == nil && len(text) > maxLeft {
		all = append(all[:len(all)/2], moreLeft)
		text, err = json.Marshal(all)
	}
	if err != nil {
		return cluster, fmt.Errorf("encode what is left behind: %w", err)
	}
	if len(all) == 0 || string(text) == cluster.GetAnnotations()[kube.AnnotationLeftBehind] {
		return cluster, nil
	}
	noted := cluster.DeepCopyObject().(T)
	annotations := maps.Clone(cluster.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[kube.AnnotationLeftBehind] = string(text)
	noted.SetAnnotations(annotations)
	// The lock keeps what is left of other profiles.
	patch := client.MergeFromWithOptions(cluster, client.MergeFromWithOptimisticLock{})
	if err := hub.Patch(ctx, noted, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return cluster, fmt.Errorf("note what is left behind on cluster %s: %w", client.ObjectKeyFromObject(cluster), err)
	}
	return noted, nil
}

// union returns what is in a or in b, once each, in that order.
func union(a, b []string) []string {
	var all []string
	for _, text := range slices.Concat(a, b) {
		if !slices.Contains(all, text) {
			all = append(all, text)
		}
	}
	return all
}
