package unclaimed

import (
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

// decision is what to do about one bundle on a member.
type decision string

const (
	// claimed bundles are somebody else's work: their summary's, or that of the profile that is about to make one.
	claimed decision = "claimed"
	// withdraw: the order to withdraw the bundle is proved.
	withdraw decision = "withdraw"
	// keep: no order is proved. People decide.
	keep decision = "keep"
)

// profileState is what the hub knows of the profile behind a bundle.
type profileState string

const (
	profileMissing   profileState = "missing"
	profileDeleting  profileState = "deleting"
	profileMatches   profileState = "matches"
	profileUnmatched profileState = "unmatched" // it exists and does not match the cluster
	profileUndecided profileState = "undecided" // it is paused, or its selector is invalid
)

// evidence is what is known of one bundle on a member.
type evidence struct {
	deployed bundle.Deployed
	hubUID   string
	// summary is that of the bundle, nil if there is none.
	summary *configv1beta1.ClusterSummary
	profile profileState
	// ordered says that a person asked for the withdrawal (kube.AnnotationWithdraw).
	ordered bool
	// listed says that the cluster's ClusterConfiguration lists the bundle: this hub has deployed it, before the state that it has now.
	listed bool
	// seenDeleted says that this process saw the summary and the profile being deleted.
	seenDeleted bool
}

// decide returns what to do about a bundle. A withdrawal is proved by a person's order, by a withdrawal that has begun, by a profile that is
// being deleted or was seen being deleted, and by a profile that no longer matches. That it did match is believed of what the hub itself has a
// trace of: a hub restored from a backup has none of what was deployed after it.
func decide(e evidence) decision {
	switch {
	case e.summary != nil && e.dropped():
		return withdraw
	case e.summary != nil:
		return claimed
	case e.ordered:
		return withdraw
	case e.deployed.Hub != "" && e.deployed.Hub != e.hubUID:
		return keep
	case e.deployed.Removing, e.profile == profileDeleting:
		return withdraw
	case e.profile == profileMatches, e.profile == profileUndecided:
		return claimed
	case e.profile == profileUnmatched && (e.deployed.Requested || e.listed), e.profile == profileMissing && e.seenDeleted:
		return withdraw
	default:
		return keep
	}
}

// dropped says whether the summary no longer asks for the feature of a bundle, of which its own controller does not know: that looks at groups.
func (e evidence) dropped() bool {
	spec := e.summary.Spec.ClusterProfileSpec
	if !e.summary.DeletionTimestamp.IsZero() || e.deployed.Requested || spec.SyncMode == configv1beta1.SyncModeOneTime {
		return false
	}
	return map[string]bool{
		string(libv1beta1.FeatureResources): len(spec.PolicyRefs) == 0,
		string(libv1beta1.FeatureHelm):      len(spec.HelmCharts) == 0,
		string(libv1beta1.FeatureKustomize): len(spec.KustomizationRefs) == 0,
	}[e.deployed.ID.Feature]
}
