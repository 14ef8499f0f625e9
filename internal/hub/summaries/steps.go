package summaries

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

const (
	// longestRecheck is the longest pause between two looks at a withdrawal that is not done.
	longestRecheck = 30 * time.Second
	// unverifiedRecheck is how often a repository is asked again for a signature that it does not have: no watch tells
	// when it comes.
	unverifiedRecheck = 5 * time.Minute
	// forcedLimit is how long one withdrawal from a member that leaves by force may take.
	forcedLimit = 20 * time.Second
)

// state is what the steps of one reconcile know.
type state struct {
	summary *configv1beta1.ClusterSummary
	// cluster is nil if the cluster object is gone; member then only has a name.
	cluster client.Object
	member  fleet.Member
	// deployed is what the member holds of the summary, by feature.
	deployed map[libv1beta1.FeatureID]bundle.Deployed
	// compositions are what the features want, as far as that could be made.
	compositions []Composition
	pass         status.Pass
	// unlisted are the features to take out of the cluster's inventory.
	unlisted []libv1beta1.FeatureID
	// retry is why to try again, later after each failure; next is when to look again at what is merely not done.
	retry error
	next  time.Duration
	// edited says that somebody else changed the status after this reconcile wrote it.
	edited bool
	// free says that nothing is left to do for a deleted summary.
	free bool
}

func (s *state) deleting() bool { return !s.summary.DeletionTimestamp.IsZero() }

func (s *state) spec() configv1beta1.ProfileSpec { return s.summary.Spec.ClusterProfileSpec }

func (s *state) find(finding status.Finding) { s.pass.Findings = append(s.pass.Findings, finding) }

func (s *state) old(id libv1beta1.FeatureID) configv1beta1.FeatureSummary {
	return status.FeatureOf(s.summary.Status, id)
}

// id names the bundle of a feature.
func (s *state) id(feature libv1beta1.FeatureID) bundle.ID { return idOf(s.summary, feature) }

func idOf(summary *configv1beta1.ClusterSummary, feature libv1beta1.FeatureID) bundle.ID {
	return bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: summary.Name, Feature: string(feature)}
}

// allFeatures lists the features in the order in which they are deployed.
func allFeatures() []libv1beta1.FeatureID {
	return []libv1beta1.FeatureID{libv1beta1.FeatureResources, libv1beta1.FeatureHelm, libv1beta1.FeatureKustomize}
}

// asksFor says whether the spec has anything of a feature.
func (s *state) asksFor(feature libv1beta1.FeatureID) bool {
	return map[libv1beta1.FeatureID]bool{
		libv1beta1.FeatureResources: len(s.spec().PolicyRefs) > 0,
		libv1beta1.FeatureHelm:      len(s.spec().HelmCharts) > 0,
		libv1beta1.FeatureKustomize: len(s.spec().KustomizationRefs) > 0,
	}[feature]
}

// wanted lists the features that the summary asks for, in the order in which they are deployed.
func (s *state) wanted() []libv1beta1.FeatureID {
	if s.deleting() {
		return nil
	}
	return slices.DeleteFunc(allFeatures(), func(f libv1beta1.FeatureID) bool { return !s.asksFor(f) })
}

// leaving lists the features that something may be left of on the member although it is not wanted, the last deployed
// first. What the member holds decides; the status only adds to it, and so does the spec of a summary that is deleted:
// a record or group may have been lost.
func (s *state) leaving() []libv1beta1.FeatureID {
	var features []libv1beta1.FeatureID
	for _, feature := range slices.Backward(allFeatures()) {
		if slices.Contains(s.wanted(), feature) || s.settled(feature) {
			continue
		}
		_, deployed := s.deployed[feature]
		reported := s.old(feature).Status
		suspected := reported != "" || s.deleting() && s.asksFor(feature)
		if deployed || (suspected && reported != libv1beta1.FeatureStatusRemoved) {
			features = append(features, feature)
		}
	}
	return features
}

// load reads the cluster that the summary is about.
func (c *Controller) load(ctx context.Context, s *state) error {
	of := match.Target(s.summary)
	member, cluster, err := fleet.Get(ctx, c.Hub, of.Type, of.Namespace, of.Name)
	if apierrors.IsNotFound(err) {
		s.member = fleet.Member{Type: of.Type, Namespace: of.Namespace, Name: of.Name}
		if s.deleting() {
			return nil
		}
		// The profile takes the summary away, unless the cluster comes back first.
		s.pass.Message = fmt.Sprintf("cluster %s does not exist", s.member.Key())
		return phase.Wait{Reason: s.pass.Message}
	}
	if err != nil {
		return err
	}
	s.cluster, s.member = cluster, member
	return nil
}

// findDeployed reads what the member holds of the summary.
func (c *Controller) findDeployed(ctx context.Context, s *state) error {
	s.deployed = map[libv1beta1.FeatureID]bundle.Deployed{}
	if s.cluster == nil || s.neverDelivered() {
		return nil
	}
	for _, feature := range allFeatures() {
		deployed, ok, err := c.Transport.FindDeployed(ctx, s.member, s.id(feature))
		if err != nil && s.deleting() && s.member.Forced {
			return nil // nobody waits for a member that leaves by force
		}
		if err != nil {
			return s.unknown(err)
		}
		if ok {
			s.deployed[feature] = deployed
		}
	}
	return nil
}

// unknown reports that it is not known what the member holds, so that nothing is done to it.
func (s *state) unknown(err error) error {
	s.retry = errors.Join(s.retry, err)
	finding := status.Finding{Kind: status.Broken, Err: err, Reason: status.ReasonDeliver, Status: libv1beta1.FeatureStatusFailed, Attempt: true}
	features := s.wanted()
	if s.deleting() {
		finding.Kind, finding.Status, features = status.Leaving, leavingStatus(s.member), s.leaving()
	}
	for _, finding.Feature = range features {
		s.find(finding)
	}
	return phase.Wait{Reason: err.Error()}
}

// neverDelivered says of a deleted summary that an earlier version has put its finalizer on it and delivered nothing:
// its cluster was never reached, and its status, which is there, has no hash.
func (s *state) neverDelivered() bool {
	features := s.summary.Status.FeatureSummaries
	return s.deleting() && s.cluster != nil && !s.member.Ready && len(features) > 0 &&
		!slices.ContainsFunc(features, func(f configv1beta1.FeatureSummary) bool { return len(f.Hash) > 0 || f.LastAppliedTime != nil })
}

// hold puts our finalizer on the summary before anything is delivered for it. A summary without it has nothing on the
// member, and no generated values.
func (c *Controller) hold(ctx context.Context, s *state) error {
	if len(s.compositions) == 0 && len(s.deployed) == 0 {
		return nil
	}
	return c.ensureFinalizer(ctx, s)
}

func (c *Controller) ensureFinalizer(ctx context.Context, s *state) error {
	held := s.summary.DeepCopy()
	if !controllerutil.AddFinalizer(held, configv1beta1.ClusterSummaryFinalizer) {
		return nil
	}
	patch := client.MergeFromWithOptions(s.summary, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Patch(ctx, held, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("add finalizer: %w", err)
	}
	s.summary = held
	return nil
}

// gate ends the reconcile where nothing may or can be done to the member. What people ask to leave is not kept by a
// pause.
func (c *Controller) gate(_ context.Context, s *state) error {
	if s.deleting() && (s.cluster == nil || s.member.Forced || s.neverDelivered()) {
		return nil
	}
	if s.member.Deleting && !s.deleting() {
		s.pass.Suspended = fmt.Sprintf("cluster %s is being deregistered", s.member.Key())
	} else if !s.member.Deleting {
		s.pass.Suspended = s.paused()
	}
	if s.pass.Suspended != "" {
		return phase.Wait{Reason: s.pass.Suspended}
	}
	if message := status.Unsupported(Unsupported(s.spec(), s.summary.Labels)); message != "" && !s.deleting() {
		return s.refuse(message)
	}
	if why := unreachable(s.member); why != "" {
		s.hold(why)
		return phase.Wait{Reason: why}
	}
	if !s.deleting() && !s.member.HasFinalizer {
		// It could not be withdrawn in order. The hub is about to change that.
		return phase.Wait{Reason: "the cluster is not held yet"}
	}
	return nil
}

// paused says who has paused what the summary is about, "" if nobody has.
func (s *state) paused() string {
	if s.member.Paused {
		return fmt.Sprintf("cluster %s is paused", s.member.Key())
	}
	if _, paused := s.summary.Annotations[libv1beta1.ProfilePausedAnnotation]; paused {
		return "the profile is paused"
	}
	return ""
}

// refuse says of every feature that nothing is done about the profile. What was delivered stays as it is.
func (s *state) refuse(message string) error {
	err := errors.New(message)
	s.pass.Message = message
	for _, feature := range s.wanted() {
		s.find(status.Finding{
			Feature: feature, Kind: status.Broken, Err: err, Reason: status.ReasonUnsupported,
			Status: libv1beta1.FeatureStatusFailedNonRetriable,
		})
	}
	return phase.Invalid{Err: err}
}

// hold says of every feature that is under way that the member cannot be reached now.
func (s *state) hold(message string) {
	s.pass.Message = message
	for _, feature := range append(s.wanted(), s.leaving()...) {
		s.find(status.Finding{
			Feature: feature, Kind: status.Held, Err: errors.New(message), Reason: status.ReasonNotReady,
			Status: heldStatus(s.old(feature).Status, s.member),
		})
	}
}

// compose makes the bundles. What cannot be made is a finding, and leaves alone what was delivered.
func (c *Controller) compose(ctx context.Context, s *state) error {
	request, err := request(s)
	if err != nil {
		return err
	}
	request.EnsureFinalizer = func(ctx context.Context) error { return c.ensureFinalizer(ctx, s) }
	references := append(c.Composer.References(request), generatedReferences(request)...)
	c.reading.set(client.ObjectKeyFromObject(s.summary), references)
	for _, feature := range s.wanted() {
		if s.settled(feature) {
			s.reportSettled(feature)
			continue
		}
		composition, err := c.composeFeature(ctx, s, request, feature)
		if apierrors.IsConflict(err) {
			return err // the summary or its generated values have changed: the reconcile is repeated
		}
		if err != nil {
			s.broken(feature, err)
			continue
		}
		s.compositions = append(s.compositions, composition)
	}
	return nil
}

// settled says whether a feature was provisioned once and for all (syncMode OneTime), as the member holds it. One that
// was provisioned while it was kept up to date is delivered once more, so that the member stops correcting its drift.
func (s *state) settled(feature libv1beta1.FeatureID) bool {
	deployed, ok := s.deployed[feature]
	if s.deleting() || s.spec().SyncMode != configv1beta1.SyncModeOneTime || !ok || deployed.CorrectDrift || deployed.Removing {
		return false
	}
	// A report that was lost comes again. A first delivery that the member has not reported on yet has a status: it is
	// under way.
	reported := s.old(feature).Status
	lost := deployed.Report.State == bundle.StatePending && (reported == libv1beta1.FeatureStatusProvisioned || reported == "")
	return deployed.Report.State == bundle.StateApplied || lost
}

// reportSettled reports a settled feature whose status was lost.
func (s *state) reportSettled(feature libv1beta1.FeatureID) {
	deployed := s.deployed[feature]
	if s.old(feature).Status == libv1beta1.FeatureStatusProvisioned || deployed.Report.State != bundle.StateApplied {
		return
	}
	var releases []configv1beta1.HelmChartSummary
	if feature == libv1beta1.FeatureHelm {
		releases = managedReleases(s.summary)
	}
	s.find(status.Finding{Feature: feature, Kind: status.Delivered, Want: deployed.Report.Digest, Report: deployed.Report, Releases: releases})
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
			return Composition{}, &contestError{lost: lost}
		}
	}
	composition, err := c.Composer.Compose(ctx, request, feature)
	if err != nil {
		return Composition{}, err
	}
	composition.Releases = contested(withUninstalled(composition.Releases, charts), lost)
	return composition, nil
}

// broken records that there is nothing to deliver for a feature.
func (s *state) broken(feature libv1beta1.FeatureID, err error) {
	old := s.old(feature)
	finding := status.Finding{
		Feature: feature, Kind: status.Broken, Err: err, Reason: reasonOf(err), Status: libv1beta1.FeatureStatusFailed, Attempt: true,
	}
	var invalid phase.Invalid
	if errors.As(err, &invalid) {
		finding.Status = libv1beta1.FeatureStatusFailedNonRetriable
		// Looking at the same thing again is no other attempt.
		finding.Attempt = old.Status != finding.Status || old.FailureMessage != err.Error()
	} else {
		s.retry = errors.Join(s.retry, fmt.Errorf("%s of %s: %w", feature, client.ObjectKeyFromObject(s.summary), err))
	}
	if errors.Is(err, source.ErrUnverified) {
		s.next = unverifiedRecheck
	}
	var contest *contestError
	if errors.As(err, &contest) {
		finding.Releases = contested(nil, contest.lost)
	}
	s.find(finding)
}

// announce reports that a delivery is under way: a push member may take minutes for it.
func (c *Controller) announce(ctx context.Context, s *state) error {
	var pass status.Pass
	var news []status.Event
	for _, composition := range s.compositions {
		old := s.old(composition.Feature)
		if bundle.DigestFromBytes(old.Hash) != composition.Digest {
			news = append(news, unanswered(s.summary.Status, composition, s.member)...)
		}
		if bundle.DigestFromBytes(old.Hash) != composition.Digest || !underWay(old.Status) {
			pass.Findings = append(pass.Findings, status.Finding{Feature: composition.Feature, Kind: status.Delivered, Want: composition.Digest, Releases: composition.Releases})
		}
	}
	if len(pass.Findings) == 0 {
		return nil
	}
	if err := c.write(ctx, s, status.Fold(s.summary.Status, pass)); err != nil {
		return err
	}
	for _, event := range news {
		c.tell(s.summary, event)
	}
	return nil
}

// deliver asks the member for every bundle, one after the other.
func (c *Controller) deliver(ctx context.Context, s *state) error {
	for _, composition := range s.compositions {
		composition.Bundle.KeepObjects = s.isOlder(composition)
		report, err := c.Transport.Deliver(ctx, s.member, composition.Bundle)
		if ctx.Err() != nil {
			return fmt.Errorf("deliver %s to %s: %w", composition.Bundle.ID, s.member.Key(), ctx.Err())
		}
		finding := status.Finding{
			Feature: composition.Feature, Kind: status.Delivered, Want: composition.Digest, Report: report,
			Reason: applyReason(report), Releases: composition.Releases, Attempt: err != nil,
		}
		if err != nil {
			s.retry = errors.Join(s.retry, err)
			if report.State != bundle.StateFailed {
				finding.Kind, finding.Err, finding.Reason, finding.Status = status.Broken, err, status.ReasonDeliver, libv1beta1.FeatureStatusFailed
			}
		}
		s.find(finding)
		if recheck := c.Recheck[s.member.Mode]; len(report.Outdated) > 0 && recheck > 0 {
			s.next = recheck // it is rendered again, and no watch shows that it must be
		}
	}
	return nil
}

// isOlder says whether the member holds another bundle than the one that this hub asks for and saw applied: the hub was
// restored from a backup. Where an agent delivers, it is the agent that finds out.
func (s *state) isOlder(c Composition) bool {
	old, deployed := s.old(c.Feature), s.deployed[c.Feature]
	return old.Status == libv1beta1.FeatureStatusProvisioned && bundle.DigestFromBytes(old.Hash) == c.Digest &&
		deployed.Report.State == bundle.StateApplied && deployed.Report.Digest != c.Digest
}

// retire withdraws what is wanted no more; everything, if the summary is deleted.
func (c *Controller) retire(ctx context.Context, s *state) error {
	why, err := c.lost(ctx, s)
	if err != nil {
		return err
	}
	if why != "" {
		return c.abandon(ctx, s, why)
	}
	s.free = true
	if s.neverDelivered() {
		return nil
	}
	for _, feature := range s.leaving() {
		w := bundle.Withdrawal{ID: s.id(feature), Orphan: s.leave()}
		done, err := c.withdraw(ctx, s.member, w)
		if ctx.Err() != nil {
			return fmt.Errorf("withdraw %s from %s: %w", w.ID, s.member.Key(), ctx.Err())
		}
		if done && err == nil {
			s.find(status.Finding{Feature: feature, Kind: status.Left})
			s.unlisted = append(s.unlisted, feature)
			continue
		}
		s.free = false
		s.retry = errors.Join(s.retry, err)
		s.next = c.recheck(s)
		finding := status.Finding{Feature: feature, Kind: status.Leaving, Err: err, Status: leavingStatus(s.member), Attempt: err != nil}
		if err != nil {
			finding.Reason = status.ReasonDeliver
		}
		s.find(finding)
	}
	return nil
}

// withdraw asks the member to withdraw. One that takes the request and does not answer holds no deregistration by force
// up.
func (c *Controller) withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	if m.Forced {
		limited, cancel := context.WithTimeout(ctx, forcedLimit)
		defer cancel()
		ctx = limited
	}
	return c.Transport.Withdraw(ctx, m, w)
}

// recheck says when to look at a withdrawal again: a quarter of the time that it has taken already, within limits.
func (c *Controller) recheck(s *state) time.Duration {
	least := c.Recheck[s.member.Mode]
	if least == 0 || !s.deleting() {
		return least
	}
	return min(max(c.Clock.Since(s.summary.DeletionTimestamp.Time)/4, least), longestRecheck)
}

// release lets a deleted summary go.
func (c *Controller) release(ctx context.Context, s *state) error {
	if !s.deleting() || !s.free {
		return nil
	}
	free := s.summary.DeepCopy()
	if !controllerutil.RemoveFinalizer(free, configv1beta1.ClusterSummaryFinalizer) {
		return nil
	}
	patch := client.MergeFromWithOptions(s.summary, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Patch(ctx, free, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove finalizer: %w", err)
	}
	return nil
}
