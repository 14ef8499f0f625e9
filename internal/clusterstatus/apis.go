package clusterstatus

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// maxStatusAPIs limits the API versions in the status of a Cluster, and the resources of each version.
// maxStatusAPIBytes limits their size as JSON. The hub's API server would reject the whole status if it were larger.
const (
	maxStatusAPIs     = 5000
	maxStatusAPIBytes = 1 << 20
)

// listAPIs lists the APIs of the cluster. If some group versions fail, it returns the others and an error.
func (o *Observer) listAPIs() ([]clusterv1alpha1.APIEnablement, error) {
	_, lists, err := o.discoveryClient.ServerGroupsAndResources()
	return toAPIEnablements(lists), err
}

// toAPIEnablements converts discovery results. The result is sorted and has no subresources.
func toAPIEnablements(lists []*metav1.APIResourceList) []clusterv1alpha1.APIEnablement {
	var all []clusterv1alpha1.APIEnablement
	for _, list := range lists {
		api := clusterv1alpha1.APIEnablement{GroupVersion: list.GroupVersion}
		for _, resource := range list.APIResources {
			if !strings.Contains(resource.Name, "/") {
				api.Resources = append(api.Resources, clusterv1alpha1.APIResource{Name: resource.Name, Kind: resource.Kind})
			}
		}
		slices.SortFunc(api.Resources, func(a, b clusterv1alpha1.APIResource) int {
			return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind))
		})
		all = append(all, api)
	}
	sortAPIs(all)
	return all
}

func sortAPIs(all []clusterv1alpha1.APIEnablement) {
	slices.SortFunc(all, func(a, b clusterv1alpha1.APIEnablement) int { return cmp.Compare(a.GroupVersion, b.GroupVersion) })
}

// failedGroupVersions returns the group versions that failed in a discovery with the error err, or all if the whole
// discovery failed.
func failedGroupVersions(err error) (versions map[schema.GroupVersion]error, all bool) {
	var failed *discovery.ErrGroupDiscoveryFailed
	if errors.As(err, &failed) {
		return failed.Groups, false
	}
	return nil, err != nil
}

// discoveryResult is a list of APIs. If err is set, the list is incomplete or empty.
type discoveryResult struct {
	found []clusterv1alpha1.APIEnablement
	err   error
}

// mergeAPIs returns the APIs of a cluster after a discovery, and the APIs among them that are unavailable now. An API
// that was known before stays in the list while it is unavailable, since charts would render differently without it.
// old has the APIs of the status. oldUnavailable has the APIs that failed in the previous discovery, in case another
// client has removed them from the status.
func mergeAPIs(old, oldUnavailable []clusterv1alpha1.APIEnablement, result discoveryResult) (merged, unavailable []clusterv1alpha1.APIEnablement) {
	failed, all := failedGroupVersions(result.err)
	if all || len(result.found) == 0 {
		return old, oldUnavailable
	}
	known := make(map[string]bool, len(result.found))
	for _, api := range result.found {
		known[api.GroupVersion] = true
	}
	for _, api := range slices.Concat(old, oldUnavailable) {
		gv, parseErr := schema.ParseGroupVersion(api.GroupVersion)
		if _, hasFailed := failed[gv]; parseErr == nil && hasFailed && !known[api.GroupVersion] {
			known[api.GroupVersion] = true
			unavailable = append(unavailable, api)
		}
	}
	merged = slices.Concat(result.found, unavailable)
	sortAPIs(merged)
	return merged, unavailable
}

// checkFitsStatus returns an error if the APIs are too many or too large for the status of a Cluster.
func checkFitsStatus(apis []clusterv1alpha1.APIEnablement) error {
	if len(apis) > maxStatusAPIs {
		return fmt.Errorf("the cluster serves more than %d API versions", maxStatusAPIs)
	}
	for _, api := range apis {
		if len(api.Resources) > maxStatusAPIs {
			return fmt.Errorf("the cluster serves more than %d resources in %s", maxStatusAPIs, api.GroupVersion)
		}
	}
	if raw, err := json.Marshal(apis); err != nil || len(raw) > maxStatusAPIBytes {
		return fmt.Errorf("the cluster serves APIs of more than %d MiB", maxStatusAPIBytes>>20)
	}
	return nil
}

// completenessCondition returns the condition CompleteAPIEnablements for the result of a discovery.
func completenessCondition(found []clusterv1alpha1.APIEnablement, err error) metav1.Condition {
	condition := metav1.Condition{Type: clusterv1alpha1.ClusterConditionCompleteAPIEnablements, Status: metav1.ConditionFalse}
	failed, all := failedGroupVersions(err)
	switch {
	case all:
		condition.Reason, condition.Message = clusterv1alpha1.ReasonAPIEnablementsEmpty, "the APIs cannot be listed: "+StableMessage(err)
	case len(found) == 0:
		condition.Reason, condition.Message = clusterv1alpha1.ReasonAPIEnablementsEmpty, "the cluster lists no API"
	case err != nil:
		names := slices.Sorted(maps.Keys(groupVersionNames(failed)))
		condition.Reason, condition.Message = clusterv1alpha1.ReasonAPIEnablementsPartial, kube.Truncate("these APIs do not answer: "+strings.Join(names, ", "), maxMessage)
	default:
		condition.Status = metav1.ConditionTrue
		condition.Reason, condition.Message = clusterv1alpha1.ReasonAPIEnablementsComplete, "all APIs are known"
	}
	return condition
}

func groupVersionNames(versions map[schema.GroupVersion]error) map[string]struct{} {
	names := make(map[string]struct{}, len(versions))
	for gv := range versions {
		names[gv.String()] = struct{}{}
	}
	return names
}
