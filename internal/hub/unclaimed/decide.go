package unclaimed

import (
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub/summaries"
)

// decision is the result of decide for one bundle on a member.
type decision string

const (
	// claimed: the bundle's summary or profile manages it, or the profile is undecided.
	claimed decision = "claimed"
	// withdraw: the hub has evidence that the bundle must be withdrawn.
	withdraw decision = "withdraw"
	// keep: the hub has no such evidence. The condition of the cluster lists the bundle.
	keep decision = "keep"
)

// profileState is the state of the profile of a bundle.
type profileState string

const (
	profileMissing   profileState = "missing"
	profileDeleting  profileState = "deleting"
	profileMatches   profileState = "matches"
	profileUnmatched profileState = "unmatched" // it exists and does not match the cluster
	profileUndecided profileState = "undecided" // it is paused, or its selector is invalid
)

// evidence has the facts about one bundle on a member. gatherEvidence collects them.
type evidence struct {
	deployed locatedBundle
	hubUID   string
	// summary is the ClusterSummary named in the bundle's ID, nil if it does not exist.
	summary *configv1beta1.ClusterSummary
	profile profileState
	// withdrawRequested is true if the user has requested the withdrawal (kube.AnnotationWithdraw).
	withdrawRequested bool
	// isListed is true if the cluster's ClusterConfiguration lists the bundle. This proves that the hub was not restored
	// from a backup that is older than the first deployment of the bundle.
	isListed bool
	// seenDeleted is true if this process has seen the deletion of the summary and of the profile.
	seenDeleted bool
}

// decide returns the decision for a bundle. A bundle of another hub is withdrawn only in the first of these cases, and
// a bundle of this hub in each of them:
//
//   - The user requested the withdrawal, and no summary has the bundle's feature.
//   - Its summary no longer has the feature.
//   - A withdrawal has started, or the profile is being deleted.
//   - This process has seen the deletion of the profile and of the summary.
//   - The profile no longer matches, and the hub has a group or a ClusterConfiguration entry for the bundle. Without
//     them the hub may have been restored from a backup that is older than the deployment.
func decide(e evidence) decision {
	switch {
	case e.summary != nil && !e.isDropped():
		return claimed
	case e.withdrawRequested:
		return withdraw
	case e.deployed.Hub != "" && e.deployed.Hub != e.hubUID:
		return keep
	case e.summary != nil:
		return withdraw
	case e.deployed.Removing, e.profile == profileDeleting:
		return withdraw
	case e.profile == profileMatches, e.profile == profileUndecided:
		return claimed
	case e.profile == profileUnmatched && (e.deployed.Requested || e.isListed), e.profile == profileMissing && e.seenDeleted:
		return withdraw
	default:
		return keep
	}
}

// isDropped returns whether the summary no longer has the bundle's feature. It returns false for bundles with a group,
// because summaries.Controller withdraws them, and for syncMode OneTime, because such bundles stay.
func (e evidence) isDropped() bool {
	spec := e.summary.Spec.ClusterProfileSpec
	if !e.summary.DeletionTimestamp.IsZero() || e.deployed.Requested || spec.SyncMode == configv1beta1.SyncModeOneTime {
		return false
	}
	spec = summaries.SpecForMode(spec, e.deployed.location.Mode)
	return map[string]bool{
		string(libv1beta1.FeatureResources): len(spec.PolicyRefs) == 0,
		string(libv1beta1.FeatureHelm):      len(spec.HelmCharts) == 0,
		string(libv1beta1.FeatureKustomize): len(spec.KustomizationRefs) == 0,
	}[e.deployed.ID.Feature]
}
