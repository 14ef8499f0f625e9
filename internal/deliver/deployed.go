package deliver

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// maxUnrequested is the maximum number of bundles that an agent lists on its Lease: an annotation holds 256 KiB. The
// others follow when listed bundles are withdrawn.
const maxUnrequested = 200

// deployedBy converts a group to a Deployed. Its report is Pending unless the status is about the current spec.
func deployedBy(group *libv1beta1.ConfigurationGroup) (bundle.Deployed, bool) {
	id, ok := IDOf(group)
	report := ReportOf(group)
	if !isObserved(group) {
		// The status describes an older spec.
		report = bundle.Report{ID: id, State: bundle.StatePending}
	}
	return bundle.Deployed{
		ID: id, Hub: group.Annotations[kube.AnnotationHub],
		Owner:    bundle.Owner{Kind: group.Annotations[kube.AnnotationOwnerKind], Name: group.Annotations[kube.AnnotationOwnerName], Tier: group.Spec.Tier},
		Removing: group.Spec.Action == libv1beta1.ActionRemove, Orphan: group.Spec.LeavePolicies, CorrectDrift: group.Spec.DriftDetection, Requested: true, Report: report,
		Releases: releasesOf(group), Inputs: group.Annotations[annotationInputs],
	}, ok
}

// releasesOf returns the Helm releases that a group lists. Groups that request a removal, and groups of other hubs,
// list none.
func releasesOf(group *libv1beta1.ConfigurationGroup) []bundle.DeployedRelease {
	var outlined outline
	if !isFromTowline(group) || json.Unmarshal([]byte(group.Annotations[annotationBundle]), &outlined) != nil {
		return nil
	}
	return outlined.Releases
}

// FindDeployed returns the Deployed of the group of id. It makes no request if the PullTransport reads groups from a
// cache.
func (o *PullTransport) FindDeployed(ctx context.Context, m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	group, err := o.readClaimedGroup(ctx, o.hub, m, id)
	if err != nil || !exists(group) {
		return bundle.Deployed{}, false, err
	}
	found, ok := deployedBy(group)
	return found, ok, nil
}

// ListDeployed lists the bundles in m's groups and the unrequested bundles on its agent's Lease.
func (o *PullTransport) ListDeployed(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error) {
	if _, err := o.checkClaim(ctx, m); err != nil {
		return nil, fmt.Errorf("list bundles of member %s: %w", m.Key(), err)
	}
	groups := &libv1beta1.ConfigurationGroupList{}
	mine := client.MatchingLabels{libv1beta1.PullClusterNameLabel: labelValue(m.Name)}
	if err := o.hub.List(ctx, groups, client.InNamespace(m.DeliveryNamespace), mine, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list groups of member %s: %w", m.Key(), err)
	}
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: m.DeliveryNamespace, Name: m.Name}
	if err := o.hub.Get(ctx, key, lease); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read Lease %s: %w", key, err)
	}
	var all []bundle.Deployed
	requested := map[bundle.ID]bool{}
	for i := range groups.Items {
		if d, ok := deployedBy(&groups.Items[i]); ok {
			all, requested[d.ID] = append(all, d), true
		}
	}
	for _, d := range unrequestedOn(lease) {
		if !requested[d.ID] {
			all = append(all, d)
		}
	}
	slices.SortFunc(all, compareDeployed)
	return all, nil
}

func compareDeployed(a, b bundle.Deployed) int { return cmp.Compare(a.ID.String(), b.ID.String()) }

// unrequestedOn reads the bundles that an agent lists on its Lease. An invalid list is ignored; the agent overwrites
// it.
func unrequestedOn(lease *coordinationv1.Lease) []bundle.Deployed {
	var all []bundle.Deployed
	if text := lease.Annotations[kube.AnnotationUnrequested]; text != "" && json.Unmarshal([]byte(text), &all) != nil {
		return nil
	}
	return slices.DeleteFunc(all, func(d bundle.Deployed) bool {
		return d.ID.RequestorKind == "" || d.ID.RequestorName == "" || d.ID.Feature == ""
	})
}

// Unrequested returns the value of kube.AnnotationUnrequested: the bundles in deployed without a group, "" if there are
// none. known is false before the groups have been listed.
func (i *AgentSource) Unrequested(deployed []bundle.Deployed) (value string, known bool) {
	i.groups.mu.Lock()
	defer i.groups.mu.Unlock()
	if !i.groups.synced {
		return "", false
	}
	requested := make(map[bundle.ID]bool, len(i.groups.byName))
	for _, group := range i.groups.byName {
		if id, ok := IDOf(group); ok {
			requested[id] = true
		}
	}
	rest := slices.DeleteFunc(slices.Clone(deployed), func(d bundle.Deployed) bool { return requested[d.ID] })
	if len(rest) == 0 {
		return "", true
	}
	raw, err := json.Marshal(rest[:min(len(rest), maxUnrequested)])
	if err != nil {
		return "", false // strings always have a JSON form
	}
	return string(raw), true
}
