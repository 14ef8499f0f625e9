package survey

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

// maxStatusAPIs limits the API versions in the status of a Cluster, and the resources of each. maxStatusAPIBytes limits
// all of them as JSON, in bytes. The API server of the hub would reject a larger status as a whole.
const (
	maxStatusAPIs     = 5000
	maxStatusAPIBytes = 1 << 20
)

// listAPIs lists the APIs that the cluster serves. If some group versions fail, it returns the other ones and an error.
func (o *Observer) listAPIs() ([]clusterv1alpha1.APIEnablement, error) {
	_, lists, err := o.discoveryClient.ServerGroupsAndResources()
	return enablements(lists), err
}

// enablements converts discovery results. The result is sorted and has no subresources.
func enablements(lists []*metav1.APIResourceList) []clusterv1alpha1.APIEnablement {
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

// failedGroupVersions returns the group versions that a discovery error is about. all is true if discovery failed as a
// whole.
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

// mergeAPIs returns the APIs of a cluster after a discovery, and the APIs among them that are unavailable now. An
// unavailable API stays in the list, as it was known before: charts would render differently without it. old has the
// APIs of the status, and unavailable those that failed in the previous discovery: others may have overwritten the
// status.
func mergeAPIs(old, unavailable []clusterv1alpha1.APIEnablement, result discoveryResult) (merged, nowUnavailable []clusterv1alpha1.APIEnablement) {
	failed, all := failedGroupVersions(result.err)
	if all || len(result.found) == 0 {
		return old, unavailable
	}
	known := make(map[string]bool, len(result.found))
	for _, api := range result.found {
		known[api.GroupVersion] = true
	}
	for _, api := range slices.Concat(old, unavailable) {
		gv, parseErr := schema.ParseGroupVersion(api.GroupVersion)
		if _, hasFailed := failed[gv]; parseErr == nil && hasFailed && !known[api.GroupVersion] {
			known[api.GroupVersion] = true
			nowUnavailable = append(nowUnavailable, api)
		}
	}
	merged = slices.Concat(result.found, nowUnavailable)
	sortAPIs(merged)
	return merged, nowUnavailable
}

// checkFitsStatus returns an error if the status of a Cluster cannot have the APIs.
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
