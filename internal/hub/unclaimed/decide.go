package unclaimed

import (
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

// decision is what to do about one bundle on a member.
type decision string

const (
	// claimed: the bundle's summary or profile is responsible for it, or the profile cannot be evaluated now (paused, invalid selector).
	claimed decision = "claimed"
	// withdraw: the hub has evidence that the withdrawal is wanted.
	withdraw decision = "withdraw"
	// keep: no such evidence. The bundle is reported to the user.
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
	// summary is the ClusterSummary named in the bundle's ID, nil if there is none.
	summary *configv1beta1.ClusterSummary
	profile profileState
	// ordered says that a person asked for the withdrawal (kube.AnnotationWithdraw).
	ordered bool
	// listed says that the cluster's ClusterConfiguration lists the bundle, so the hub's data is newer than the first deployment.
	listed bool
	// seenDeleted says that this process saw the summary and the profile being deleted.
	seenDeleted bool
}

// decide returns what to do about a bundle. A bundle is withdrawn if its summary no longer has the feature, the user requested it, a withdrawal
// began, the profile is being deleted, profile and summary were seen deleted, or the profile no longer matches and the hub has a group or a
// ClusterConfiguration entry. Without such an entry the hub may be a backup that is older than the deployment. Bundles of another hub need the
// user's request.
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

// dropped reports whether the summary no longer has the bundle's feature. The summary controller handles bundles that have a group, and OneTime
// bundles stay.
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
