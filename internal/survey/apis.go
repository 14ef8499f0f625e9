package survey

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// apis lists what the cluster serves. With the error of some group versions comes the list of the others.
func (o *Observer) apis() ([]clusterv1alpha1.APIEnablement, error) {
	_, lists, err := o.discovery.ServerGroupsAndResources()
	return enablements(lists), err
}

// enablements lists APIs, sorted and without subresources.
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

// silent returns the group versions that did not answer, by the error of a list; all says that none did.
func silent(err error) (versions map[schema.GroupVersion]error, all bool) {
	var failed *discovery.ErrGroupDiscoveryFailed
	if errors.As(err, &failed) {
		return failed.Groups, false
	}
	return nil, err != nil
}

// listed is a list of APIs. With an error it has gaps, or is empty.
type listed struct {
	found []clusterv1alpha1.APIEnablement
	err   error
}

// merge returns the APIs of a cluster of which old were known, and those of them that do not answer. These are served
// as before: a list with gaps would make charts render as if an API had gone. away are those that did not answer
// before: old is output, and may have been lost since.
func merge(old, away []clusterv1alpha1.APIEnablement, now listed) (merged, nowAway []clusterv1alpha1.APIEnablement) {
	failed, all := silent(now.err)
	if all || len(now.found) == 0 {
		return old, away
	}
	known := make(map[string]bool, len(now.found))
	for _, api := range now.found {
		known[api.GroupVersion] = true
	}
	for _, api := range slices.Concat(old, away) {
		gv, bad := schema.ParseGroupVersion(api.GroupVersion)
		if _, missing := failed[gv]; bad == nil && missing && !known[api.GroupVersion] {
			known[api.GroupVersion] = true
			nowAway = append(nowAway, api)
		}
	}
	merged = slices.Concat(now.found, nowAway)
	sortAPIs(merged)
	return merged, nowAway
}

// completeness returns the condition CompleteAPIEnablements of a cluster that listed found with err.
func completeness(found []clusterv1alpha1.APIEnablement, err error) metav1.Condition {
	condition := metav1.Condition{Type: clusterv1alpha1.ClusterConditionCompleteAPIEnablements, Status: metav1.ConditionFalse}
	failed, all := silent(err)
	switch {
	case all:
		condition.Reason, condition.Message = clusterv1alpha1.ReasonAPIEnablementsEmpty, "no API is known: "+Steadily(err)
	case len(found) == 0:
		condition.Reason, condition.Message = clusterv1alpha1.ReasonAPIEnablementsEmpty, "no API is known: the cluster lists none"
	case err != nil:
		names := slices.Sorted(maps.Keys(namesOf(failed)))
		condition.Reason, condition.Message = clusterv1alpha1.ReasonAPIEnablementsPartial, shortened("these APIs do not answer: "+strings.Join(names, ", "))
	default:
		condition.Status = metav1.ConditionTrue
		condition.Reason, condition.Message = clusterv1alpha1.ReasonAPIEnablementsComplete, "all APIs are known"
	}
	return condition
}

func namesOf(versions map[schema.GroupVersion]error) map[string]struct{} {
	names := make(map[string]struct{}, len(versions))
	for gv := range versions {
		names[gv.String()] = struct{}{}
	}
	return names
}
