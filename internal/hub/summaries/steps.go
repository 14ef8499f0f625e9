package summaries

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

const (
	// maxWithdrawalInterval is the longest pause between two requests for a withdrawal that has not ended.
	maxWithdrawalInterval = 30 * time.Second
	// unverifiedInterval is the delay until the next request for a missing signature. No watch reports a new signature.
	unverifiedInterval = 5 * time.Minute
	// forcedTimeout bounds a withdrawal request to a member that is deregistered by force.
	forcedTimeout = 20 * time.Second
)

// state is shared by the steps of one reconcile.
type state struct {
	summary *configv1beta1.ClusterSummary
	// cluster is nil if the cluster object does not exist; then member has only type, namespace and name.
	cluster client.Object
	member  fleet.Member
	// deployed are the summary's bundles on the member, by feature.
	deployed map[libv1beta1.FeatureID]bundle.Deployed
	// compositions are the bundles to deliver. A feature whose bundle could not be built has a Finding instead.
	compositions []Composition
	pass         status.Pass
	// removedFeatures are to be deleted from the cluster's ClusterConfiguration.
	removedFeatures []libv1beta1.FeatureID
	// retryErr makes the reconcile repeat with backoff. recheckAfter is the delay of the next reconcile if nothing failed.
	retryErr     error
	recheckAfter time.Duration
	// statusEdited is true if another client changed the status after this reconcile wrote it.
	statusEdited bool
	// withdrawn is true if the finalizer of a deleted summary can be removed.
	withdrawn bool
}

func (s *state) isDeleting() bool { return !s.summary.DeletionTimestamp.IsZero() }

func (s *state) spec() configv1beta1.ProfileSpec { return s.summary.Spec.ClusterProfileSpec }

func (s *state) addFinding(finding status.Finding) {
	s.pass.Findings = append(s.pass.Findings, finding)
}

func (s *state) featureSummary(id libv1beta1.FeatureID) configv1beta1.FeatureSummary {
	return status.FeatureOf(s.summary.Status, id)
}

// bundleID returns the ID of the bundle of a feature.
func (s *state) bundleID(feature libv1beta1.FeatureID) bundle.ID {
	return bundleIDOf(s.summary, feature)
}

func bundleIDOf(summary *configv1beta1.ClusterSummary, feature libv1beta1.FeatureID) bundle.ID {
	return bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: summary.Name, Feature: string(feature)}
}

// allFeatures returns the features in the order in which they are deployed.
func allFeatures() []libv1beta1.FeatureID {
	return []libv1beta1.FeatureID{libv1beta1.FeatureResources, libv1beta1.FeatureHelm, libv1beta1.FeatureKustomize}
}

// specHas returns whether the spec has entries for a feature.
func (s *state) specHas(feature libv1beta1.FeatureID) bool {
	return map[libv1beta1.FeatureID]bool{
		libv1beta1.FeatureResources: len(s.spec().PolicyRefs) > 0,
		libv1beta1.FeatureHelm:      len(s.spec().HelmCharts) > 0,
		libv1beta1.FeatureKustomize: len(s.spec().KustomizationRefs) > 0,
	}[feature]
}

// wantedFeatures returns the features of the spec, in the order in which they are deployed.
func (s *state) wantedFeatures() []libv1beta1.FeatureID {
	if s.isDeleting() {
		return nil
	}
	return slices.DeleteFunc(allFeatures(), func(f libv1beta1.FeatureID) bool { return !s.specHas(f) })
}

// featuresToWithdraw returns the features to withdraw, in reverse order of deployment: the features that are not wanted
// and that the member has, the status names, or the spec of a deleted summary names. The status and the spec count,
// since the inventory or the ConfigurationGroup may be lost.
func (s *state) featuresToWithdraw() []libv1beta1.FeatureID {
	var features []libv1beta1.FeatureID
	for _, feature := range slices.Backward(allFeatures()) {
		if slices.Contains(s.wantedFeatures(), feature) || s.isOneTimeDone(feature) {
			continue
		}
		_, deployed := s.deployed[feature]
		reported := s.featureSummary(feature).Status
		suspected := reported != "" || s.isDeleting() && s.specHas(feature)
		if deployed || (suspected && reported != libv1beta1.FeatureStatusRemoved) {
			features = append(features, feature)
		}
	}
	return features
}

// load reads the cluster of the summary.
func (c *Controller) load(ctx context.Context, s *state) error {
	of := match.Target(s.summary)
	member, cluster, err := fleet.Get(ctx, c.Hub, of.Type, of.Namespace, of.Name)
	if apierrors.IsNotFound(err) {
		s.member = fleet.Member{Type: of.Type, Namespace: of.Namespace, Name: of.Name}
		if s.isDeleting() {
			return nil
		}
		// The profile controller deletes the summary, unless the cluster is created again first.
		s.pass.Message = fmt.Sprintf("cluster %s does not exist", s.member.Key())
		return phase.Wait{Reason: s.pass.Message}
	}
	if err != nil {
		return err
	}
	s.cluster, s.member = cluster, member
	return nil
}

// findDeployed reads which bundles of the summary the member has.
func (c *Controller) findDeployed(ctx context.Context, s *state) error {
	s.deployed = map[libv1beta1.FeatureID]bundle.Deployed{}
	if s.cluster == nil || s.hasNoDelivery() {
		return nil
	}
	for _, feature := range allFeatures() {
		deployed, ok, err := c.Transport.FindDeployed(ctx, s.member, s.bundleID(feature))
		if err != nil && s.isDeleting() && s.member.Forced {
			return nil // a deregistration by force does not wait for the member
		}
		if err != nil {
			return s.reportDeployedUnknown(err)
		}
		if ok {
			s.deployed[feature] = deployed
		}
	}
	return nil
}

// reportDeployedUnknown reports that the deployed bundles could not be read. Nothing is delivered or withdrawn then.
func (s *state) reportDeployedUnknown(err error) error {
	s.retryErr = errors.Join(s.retryErr, err)
	finding := status.Finding{Kind: status.Broken, Err: err, Reason: status.ReasonDeliver, Status: libv1beta1.FeatureStatusFailed, Attempt: true}
	features := s.wantedFeatures()
	if s.isDeleting() {
		finding.Kind, finding.Status, features = status.Leaving, removingStatus(s.member), s.featuresToWithdraw()
	}
	for _, finding.Feature = range features {
		s.addFinding(finding)
	}
	return phase.Wait{Reason: err.Error()}
}

// hasNoDelivery returns true for a deleted summary without a delivery: its cluster is not ready, and its status has
// features, but none of them has a hash or was applied. Earlier versions added the finalizer to such summaries.
func (s *state) hasNoDelivery() bool {
	features := s.summary.Status.FeatureSummaries
	return s.isDeleting() && s.cluster != nil && !s.member.Ready && len(features) > 0 &&
		!slices.ContainsFunc(features, func(f configv1beta1.FeatureSummary) bool { return len(f.Hash) > 0 || f.LastAppliedTime != nil })
}

// checkPreconditions ends the reconcile if the member must not or cannot be changed now. A pause does not stop the
// deregistration of a cluster.
func (c *Controller) checkPreconditions(_ context.Context, s *state) error {
	if s.isDeleting() && (s.cluster == nil || s.member.Forced || s.hasNoDelivery()) {
		return nil
	}
	if s.member.Deleting && !s.isDeleting() {
		s.pass.Suspended = fmt.Sprintf("cluster %s is being deregistered", s.member.Key())
	} else if !s.member.Deleting {
		s.pass.Suspended = s.pauseReason()
	}
	if s.pass.Suspended != "" {
		return phase.Wait{Reason: s.pass.Suspended}
	}
	if message := status.Unsupported(Unsupported(s.spec(), s.summary.Labels)); message != "" && !s.isDeleting() {
		return s.reportUnsupported(message)
	}
	if why := unreachableReason(s.member); why != "" {
		s.reportUnreachable(why)
		return phase.Wait{Reason: why}
	}
	if !s.isDeleting() && !s.member.HasFinalizer {
		// Without the finalizer its objects could not be withdrawn before it is deleted. The hub is about to add it.
		return phase.Wait{Reason: "the cluster has no finalizer yet"}
	}
	return nil
}

// pauseReason returns what is paused, "" if nothing is.
func (s *state) pauseReason() string {
	if s.member.Paused {
		return fmt.Sprintf("cluster %s is paused", s.member.Key())
	}
	if _, paused := s.summary.Annotations[libv1beta1.ProfilePausedAnnotation]; paused {
		return "the profile is paused"
	}
	return ""
}

// reportUnsupported reports every feature as failed, since the profile has unsupported fields. Deployed objects do not
// change.
func (s *state) reportUnsupported(message string) error {
	err := errors.New(message)
	s.pass.Message = message
	for _, feature := range s.wantedFeatures() {
		s.addFinding(status.Finding{
			Feature: feature, Kind: status.Broken, Err: err, Reason: status.ReasonUnsupported,
			Status: libv1beta1.FeatureStatusFailedNonRetriable,
		})
	}
	return phase.Invalid{Err: err}
}

// reportUnreachable reports for every feature that the member cannot be reached now.
func (s *state) reportUnreachable(message string) {
	s.pass.Message = message
	for _, feature := range append(s.wantedFeatures(), s.featuresToWithdraw()...) {
		s.addFinding(status.Finding{
			Feature: feature, Kind: status.Held, Err: errors.New(message), Reason: status.ReasonNotReady,
			Status: unreachableStatus(s.featureSummary(feature).Status, s.member),
		})
	}
}

// compose builds the bundles. A bundle that cannot be built becomes a Finding, and its deployed objects stay unchanged.
func (c *Controller) compose(ctx context.Context, s *state) error {
	request, err := request(s)
	if err != nil {
		return err
	}
	request.EnsureFinalizer = func(ctx context.Context) error { return c.ensureFinalizer(ctx, s) }
	references := append(c.Composer.References(request), generatedReferences(request)...)
	c.references.set(client.ObjectKeyFromObject(s.summary), references)
	for _, feature := range s.wantedFeatures() {
		if s.isOneTimeDone(feature) {
			s.restoreOneTimeStatus(feature)
			continue
		}
		composition, err := c.composeFeature(ctx, s, request, feature)
		if apierrors.IsConflict(err) {
			return err // the summary or its generated values have changed: the reconcile is repeated
		}
		if err != nil {
			s.reportFailure(feature, err)
			continue
		}
		s.compositions = append(s.compositions, composition)
	}
	return nil
}

// isOneTimeDone returns whether the member has deployed a feature with syncMode OneTime. A feature that was deployed in
// another mode is delivered once more, so that the member stops correcting its drift.
func (s *state) isOneTimeDone(feature libv1beta1.FeatureID) bool {
	deployed, ok := s.deployed[feature]
	if s.isDeleting() || s.spec().SyncMode != configv1beta1.SyncModeOneTime || !ok || deployed.CorrectDrift || deployed.Removing {
		return false
	}
	// A provisioned feature without a report has lost its report, and the member repeats it. During a first delivery the
	// status is Provisioning.
	reported := s.featureSummary(feature).Status
	lost := deployed.Report.State == bundle.StatePending && (reported == libv1beta1.FeatureStatusProvisioned || reported == "")
	return deployed.Report.State == bundle.StateApplied || lost
}

// restoreOneTimeStatus reports a OneTime feature as deployed if the member has applied it and the status was lost.
func (s *state) restoreOneTimeStatus(feature libv1beta1.FeatureID) {
	deployed := s.deployed[feature]
	if s.featureSummary(feature).Status == libv1beta1.FeatureStatusProvisioned || deployed.Report.State != bundle.StateApplied {
		return
	}
	var releases []configv1beta1.HelmChartSummary
	if feature == libv1beta1.FeatureHelm {
		releases = managedReleases(s.summary)
	}
	s.addFinding(status.Finding{Feature: feature, Kind: status.Delivered, Want: deployed.Report.Digest, Report: deployed.Report, Releases: releases})
}

func (c *Controller) composeFeature(ctx context.Context, s *state, request Request, feature libv1beta1.FeatureID) (Composition, error) {
	var lost []match.Contest
	var charts []configv1beta1.HelmChart
	if feature == libv1beta1.FeatureHelm {
		me, others, err := c.loadClusterSummaries(ctx, s.summary)
		if err != nil {
			return Composition{}, err
		}
		all := []*configv1beta1.ClusterSummary{me}
		for i := range others {
			all = append(all, &others[i])
		}
		if err := c.restoreReleaseOwners(ctx, s.member, all); err != nil {
			return Composition{}, err
		}
		charts, lost = me.Spec.ClusterProfileSpec.HelmCharts, match.Lost(me, others)
		request.Lost = lost
		if len(lost) > 0 && !s.spec().ContinueOnConflict {
			return Composition{}, &conflictError{lost: lost}
		}
	}
	composition, err := c.Composer.Compose(ctx, request, feature)
	if err != nil {
		return Composition{}, err
	}
	composition.Releases = markConflicts(withUninstallEntries(composition.Releases, charts), lost)
	return composition, nil
}

// reportFailure reports that the bundle of a feature could not be built.
func (s *state) reportFailure(feature libv1beta1.FeatureID, err error) {
	old := s.featureSummary(feature)
	finding := status.Finding{
		Feature: feature, Kind: status.Broken, Err: err, Reason: reasonOf(err), Status: libv1beta1.FeatureStatusFailed, Attempt: true,
	}
	var invalid phase.Invalid
	if errors.As(err, &invalid) {
		finding.Status = libv1beta1.FeatureStatusFailedNonRetriable
		// The same error again is not another attempt.
		finding.Attempt = old.Status != finding.Status || old.FailureMessage != err.Error()
	} else {
		s.retryErr = errors.Join(s.retryErr, fmt.Errorf("%s of %s: %w", feature, client.ObjectKeyFromObject(s.summary), err))
	}
	if errors.Is(err, source.ErrUnverified) {
		s.recheckAfter = unverifiedInterval
	}
	var contest *conflictError
	if errors.As(err, &contest) {
		finding.Releases = markConflicts(nil, contest.lost)
	}
	s.addFinding(finding)
}

// reportStart reports that a delivery begins: on a push member it may take minutes.
func (c *Controller) reportStart(ctx context.Context, s *state) error {
	var pass status.Pass
	var news []status.Event
	for _, composition := range s.compositions {
		old := s.featureSummary(composition.Feature)
		if bundle.DigestFromBytes(old.Hash) != composition.Digest {
			news = append(news, lookupEvents(s.summary.Status, composition, s.member)...)
		}
		if bundle.DigestFromBytes(old.Hash) != composition.Digest || !isDelivered(old.Status) {
			pass.Findings = append(pass.Findings, status.Finding{Feature: composition.Feature, Kind: status.Delivered, Want: composition.Digest, Releases: composition.Releases})
		}
	}
	if len(pass.Findings) == 0 {
		return nil
	}
	if err := c.writeStatus(ctx, s, status.Fold(s.summary.Status, pass)); err != nil {
		return err
	}
	for _, event := range news {
		c.recordEvent(s.summary, event)
	}
	return nil
}

// deliver delivers the bundles one after the other.
func (c *Controller) deliver(ctx context.Context, s *state) error {
	for _, composition := range s.compositions {
		composition.Bundle.KeepObjects = s.hasNewerBundle(composition)
		report, err := c.Transport.Deliver(ctx, s.member, composition.Bundle)
		if ctx.Err() != nil {
			return fmt.Errorf("deliver %s to %s: %w", composition.Bundle.ID, s.member.Key(), ctx.Err())
		}
		finding := status.Finding{
			Feature: composition.Feature, Kind: status.Delivered, Want: composition.Digest, Report: report,
			Reason: reportReason(report), Releases: composition.Releases, Attempt: err != nil,
		}
		if err != nil {
			s.retryErr = errors.Join(s.retryErr, err)
			if report.State != bundle.StateFailed {
				finding.Kind, finding.Err, finding.Reason, finding.Status = status.Broken, err, status.ReasonDeliver, libv1beta1.FeatureStatusFailed
			}
		}
		s.addFinding(finding)
		if recheck := c.Recheck[s.member.Mode]; len(report.Outdated) > 0 && recheck > 0 {
			s.recheckAfter = recheck // the release must be rendered again, which no watch reports
		}
	}
	return nil
}

// hasNewerBundle returns whether a push member has another bundle than the one that this hub saw applied: the hub was
// restored from a backup. In pull mode the agent detects that.
func (s *state) hasNewerBundle(c Composition) bool {
	old, deployed := s.featureSummary(c.Feature), s.deployed[c.Feature]
	return old.Status == libv1beta1.FeatureStatusProvisioned && bundle.DigestFromBytes(old.Hash) == c.Digest &&
		deployed.Report.State == bundle.StateApplied && deployed.Report.Digest != c.Digest
}

// withdrawFeatures withdraws the features that are no longer wanted: all of them if the summary is deleted.
func (c *Controller) withdrawFeatures(ctx context.Context, s *state) error {
	why, err := c.abandonReason(ctx, s)
	if err != nil {
		return err
	}
	if why != "" {
		return c.abandon(ctx, s, why)
	}
	s.withdrawn = true
	if s.hasNoDelivery() {
		return nil
	}
	for _, feature := range s.featuresToWithdraw() {
		w := bundle.Withdrawal{ID: s.bundleID(feature), Orphan: s.orphansObjects()}
		done, err := c.withdraw(ctx, s.member, w)
		if ctx.Err() != nil {
			return fmt.Errorf("withdraw %s from %s: %w", w.ID, s.member.Key(), ctx.Err())
		}
		if done && err == nil {
			s.addFinding(status.Finding{Feature: feature, Kind: status.Left})
			s.removedFeatures = append(s.removedFeatures, feature)
			continue
		}
		s.withdrawn = false
		s.retryErr = errors.Join(s.retryErr, err)
		s.recheckAfter = c.withdrawalInterval(s)
		finding := status.Finding{Feature: feature, Kind: status.Leaving, Err: err, Status: removingStatus(s.member), Attempt: err != nil}
		if err != nil {
			finding.Reason = status.ReasonDeliver
		}
		s.addFinding(finding)
	}
	return nil
}

// withdraw withdraws a bundle. The time limit is for a member that does not answer: a deregistration by force must not
// wait for it.
func (c *Controller) withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	if m.Forced {
		limited, cancel := context.WithTimeout(ctx, forcedTimeout)
		defer cancel()
		ctx = limited
	}
	return c.Transport.Withdraw(ctx, m, w)
}

// withdrawalInterval returns the pause until the next request for a withdrawal: a quarter of the time since the
// deletion, between Recheck and maxWithdrawalInterval.
func (c *Controller) withdrawalInterval(s *state) time.Duration {
	least := c.Recheck[s.member.Mode]
	if least == 0 || !s.isDeleting() {
		return least
	}
	return min(max(c.Clock.Since(s.summary.DeletionTimestamp.Time)/4, least), maxWithdrawalInterval)
}
