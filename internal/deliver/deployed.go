package deliver

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// maxUnrequested is the maximum number of bundles without a group that an agent lists on its Lease: an annotation holds
// 256 KiB. The agent lists further ones after these are withdrawn.
const maxUnrequested = 200

// deployedOf converts a group to a Deployed. Its report is Pending unless the status is about the current spec.
func deployedOf(group *libv1beta1.ConfigurationGroup) (bundle.Deployed, bool) {
	id, ok := IDOf(group)
	report := bundle.Report{ID: id, State: bundle.StatePending}
	if isObserved(group) {
		report = ReportOf(group)
	}
	return bundle.Deployed{
		ID: id, Hub: group.Annotations[kube.AnnotationHub],
		Owner:    bundle.Owner{Kind: group.Annotations[kube.AnnotationOwnerKind], Name: group.Annotations[kube.AnnotationOwnerName], Tier: group.Spec.Tier},
		Removing: group.Spec.Action == libv1beta1.ActionRemove, Orphan: group.Spec.LeavePolicies, CorrectDrift: group.Spec.DriftDetection, Requested: true, Report: report,
		Releases: releasesOf(group), Inputs: group.Annotations[annotationInputs],
	}, ok
}

// releasesOf returns the Helm releases that a group lists. Groups that request a removal, and groups of Sveltos hubs,
// list none.
func releasesOf(group *libv1beta1.ConfigurationGroup) []bundle.DeployedRelease {
	var outline bundleOutline
	if !isFromTowline(group) || json.Unmarshal([]byte(group.Annotations[annotationOutline]), &outline) != nil {
		return nil
	}
	return outline.Releases
}

// FindDeployed returns the Deployed of the group of id. It makes no request if the PullTransport reads groups and
// namespaces from a cache.
func (t *PullTransport) FindDeployed(ctx context.Context, m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	group, err := t.readClaimedGroup(ctx, t.hub, m, id)
	if err != nil || !isStored(group) {
		return bundle.Deployed{}, false, err
	}
	found, ok := deployedOf(group)
	return found, ok, nil
}

// ListDeployed lists the bundles in m's groups and the unrequested bundles on its agent's Lease.
func (t *PullTransport) ListDeployed(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error) {
	if err := t.checkClaim(ctx, m); err != nil && !errors.Is(err, errUnclaimed) {
		return nil, fmt.Errorf("list bundles of member %s: %w", m.Key(), err)
	}
	groups := &libv1beta1.ConfigurationGroupList{}
	ofMember := client.MatchingLabels{libv1beta1.PullClusterNameLabel: labelValue(m.Name)}
	var reader client.Reader = t.hub
	if m.CacheMayLackObjects && m.Deleting {
		// A deregistration does not wait until all groups have the label of the shard.
		reader = t.live
	}
	if err := reader.List(ctx, groups, client.InNamespace(m.DeliveryNamespace), ofMember, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list groups of member %s: %w", m.Key(), err)
	}
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: m.DeliveryNamespace, Name: m.Name}
	if err := t.hub.Get(ctx, key, lease); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read Lease %s: %w", key, err)
	}
	var all []bundle.Deployed
	requested := map[bundle.ID]bool{}
	for i := range groups.Items {
		if d, ok := deployedOf(&groups.Items[i]); ok {
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

// unrequestedOn returns the bundles that an agent lists on its Lease, see AgentSource.Unrequested: each ID once, and at
// most maxUnrequested, because each costs requests. An invalid list is ignored, and so are bundles with invalid names;
// the agent overwrites the list.
func unrequestedOn(lease *coordinationv1.Lease) []bundle.Deployed {
	var listed, all []bundle.Deployed
	if text := lease.Annotations[kube.AnnotationUnrequested]; text != "" && json.Unmarshal([]byte(text), &listed) != nil {
		return nil
	}
	known := map[bundle.ID]bool{}
	for _, d := range listed {
		if len(all) < maxUnrequested && !known[d.ID] && d.HasValidNames() {
			all, known[d.ID] = append(all, d), true
		}
	}
	return all
}
