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
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

const (
	// unverifiedInterval is the delay until an unverified chart is verified again. No watch reports a new signature.
	unverifiedInterval = 5 * time.Minute
	// unexpandedInterval is the delay until conflicts are computed again after the template in the name of a release could
	// not be expanded. It is longer than the time limit of a template.
	unexpandedInterval = 30 * time.Second
)

// state is the data that the steps of one reconcile share. A second state, local, has the data for the hub's cluster.
type state struct {
	summary *configv1beta1.ClusterSummary
	// cluster is nil if the cluster object does not exist; then member has only type, namespace and name.
	cluster client.Object
	member  fleet.Member
	// deployed are the summary's bundles on the member, by feature. It is nil before findDeployed.
	deployed map[libv1beta1.FeatureID]bundle.Deployed
	// memory is the memory of the rendered content. It is released at the end of the reconcile.
	memory *kube.ContentReservation
	// compositions are the bundles to deliver. A feature whose bundle could not be built has a result instead.
	compositions []Composition
	// delivered are the features whose bundles were delivered without an error.
	delivered []libv1beta1.FeatureID
	result    status.ReconcileResult
	// removedFeatures are the features whose entries in the ClusterConfiguration must be deleted.
	removedFeatures []libv1beta1.FeatureID
	// retryErr is returned by the reconcile, which is then repeated with backoff. recheckAfter is the delay of the next
	// reconcile if there is no error; zero means that only a watch event triggers it.
	retryErr     error
	recheckAfter time.Duration
	// isStatusEdited is true if another client changed the status after this reconcile wrote it.
	isStatusEdited bool
	// isClusterSlow is true if the member has not answered a request in time, if the requests to it took all the time of
	// the reconcile, or if the hub has no memory for its content. isProfileSlow is true if a rendering took too long.
	isClusterSlow, isProfileSlow bool
	// isWithdrawn is true after all unwanted features were withdrawn from the cluster of this state. The finalizer is
	// removed if it is true in both states.
	isWithdrawn bool
	// canAbandon is set in the local state: the deletion of the summary need not wait for the withdrawal from the hub.
	canAbandon bool
	// abandonment is set if objects of a deleted summary stay without a withdrawal, otherwise nil.
	abandonment *abandonment
	// local is the state for the content that the summary deploys to the cluster of the hub. It is nil in that state.
	local *state
}

// requeueWithin requests the next reconcile within delay.
func (s *state) requeueWithin(delay time.Duration) {
	if s.recheckAfter == 0 || delay < s.recheckAfter {
		s.recheckAfter = delay
	}
}

func (s *state) isDeleting() bool { return !s.summary.DeletionTimestamp.IsZero() }

// spec returns the spec with the content for the cluster of this state: the member or the hub.
func (s *state) spec() configv1beta1.ProfileSpec {
	return SpecForMode(s.summary.Spec.ClusterProfileSpec, s.member.Mode)
}

func (s *state) addResult(featureResult status.FeatureResult) {
	s.result.Features = append(s.result.Features, featureResult)
}

func (s *state) featureSummary(id libv1beta1.FeatureID) configv1beta1.FeatureSummary {
	return status.FeatureOf(s.summary.Status, id)
}

func (s *state) bundleID(feature libv1beta1.FeatureID) bundle.ID {
	return bundleIDOf(s.summary, feature)
}

func bundleIDOf(summary *configv1beta1.ClusterSummary, feature libv1beta1.FeatureID) bundle.ID {
	return bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: summary.Name, Feature: string(feature)}
}

// allFeatures returns the features in the order of deployment.
func allFeatures() []libv1beta1.FeatureID {
	return []libv1beta1.FeatureID{libv1beta1.FeatureResources, libv1beta1.FeatureHelm, libv1beta1.FeatureKustomize}
}

// specHas returns whether the spec for the cluster of this state has entries for a feature.
func (s *state) specHas(feature libv1beta1.FeatureID) bool {
	return map[libv1beta1.FeatureID]bool{
		libv1beta1.FeatureResources: len(s.spec().PolicyRefs) > 0,
		libv1beta1.FeatureHelm:      len(s.spec().HelmCharts) > 0,
		libv1beta1.FeatureKustomize: len(s.spec().KustomizationRefs) > 0,
	}[feature]
}

// wantedFeatures returns the features of the spec, in the order of deployment, none for a deleted summary.
func (s *state) wantedFeatures() []libv1beta1.FeatureID {
	if s.isDeleting() {
		return nil
	}
	return slices.DeleteFunc(allFeatures(), func(f libv1beta1.FeatureID) bool { return !s.specHas(f) })
}

// featuresToWithdraw returns the features that are not wanted and that the member may have, in reverse order of
// deployment. The member may have a feature if it has a record of it. Since the record can be lost, the member may also
// have the features in the status, and those in the spec of a deleted summary.
func (s *state) featuresToWithdraw() []libv1beta1.FeatureID {
	var features []libv1beta1.FeatureID
	for _, feature := range slices.Backward(allFeatures()) {
		if slices.Contains(s.wantedFeatures(), feature) || s.isOneTimeDone(feature) {
			continue
		}
		_, deployed := s.deployed[feature]
		reported := s.featureSummary(feature).Status
		if s.isLocal() || s.local != nil && s.local.specHas(feature) && !s.specHas(feature) {
			reported = libv1beta1.FeatureStatusRemoved // ignore the status, which can be about the other cluster
		}
		mayBeDeployed := reported != "" || s.isDeleting() && s.specHas(feature)
		if deployed || (mayBeDeployed && reported != libv1beta1.FeatureStatusRemoved) {
			features = append(features, feature)
		}
	}
	return features
}

// checkCluster ends the reconcile if the cluster of the summary does not exist, unless the summary is deleted.
func (c *Controller) checkCluster(_ context.Context, s *state) error {
	if s.cluster != nil || s.isDeleting() {
		return nil
	}
	// The profile controller deletes the summary unless the cluster is created again.
	s.result.FailureMessage = fmt.Sprintf("cluster %s does not exist", s.member.Key())
	return phase.Wait{Reason: s.result.FailureMessage}
}

// findDeployed reads the bundles of the summary that the member has.
func (c *Controller) findDeployed(ctx context.Context, s *state) error {
	s.deployed = map[libv1beta1.FeatureID]bundle.Deployed{}
	if s.cluster == nil && !s.isLocal() {
		return nil
	}
	for _, feature := range allFeatures() {
		deployed, ok, err := c.Transport.FindDeployed(ctx, s.member, s.bundleID(feature))
		if err != nil && s.isDeleting() && s.member.Forced && !s.isLocal() {
			return nil // a deregistration by force does not wait for the member
		}
		if err != nil {
			return s.addReadFailedResults(err)
		}
		if ok {
			s.deployed[feature] = deployed
		}
	}
	return nil
}

// addReadFailedResults adds a result for each feature after findDeployed failed. It returns a phase.Wait, which ends
// the reconcile before a delivery or a withdrawal.
func (s *state) addReadFailedResults(err error) error {
	s.isClusterSlow = isTimeout(err)
	s.retryErr = errors.Join(s.retryErr, err)
	featureResult := status.FeatureResult{Kind: status.Failed, Err: err, Reason: status.ReasonDeliver, Status: libv1beta1.FeatureStatusFailed}
	features := s.wantedFeatures()
	if s.isDeleting() {
		featureResult.Kind, featureResult.Status, features = status.Withdrawing, removingStatus(s.member), s.featuresToWithdraw()
	}
	for _, featureResult.Feature = range features {
		s.addResult(featureResult)
	}
	return phase.Wait{Reason: err.Error()}
}

// checkSuspended ends the reconcile if the cluster or the profile is paused, or if the cluster is being deregistered. A
// pause does not stop the withdrawal from a cluster that is being deregistered.
func (c *Controller) checkSuspended(_ context.Context, s *state) error {
	if s.isDeleting() && (s.cluster == nil || s.member.Forced) {
		return nil
	}
	if s.member.Deleting && !s.isDeleting() {
		s.result.SuspensionReason = fmt.Sprintf("cluster %s is being deregistered", s.member.Key())
	} else if !s.member.Deleting {
		s.result.SuspensionReason = s.pauseReason()
	}
	if s.result.SuspensionReason != "" {
		return phase.Wait{Reason: s.result.SuspensionReason}
	}
	return nil
}

// checkSupported ends the reconcile if the profile has an unsupported field.
func (c *Controller) checkSupported(_ context.Context, s *state) error {
	if message := status.UnsupportedMessage(UnsupportedFields(s.summary.Spec.ClusterProfileSpec)); message != "" {
		return s.addUnsupportedResults(message)
	}
	return nil
}

// checkReachable ends the reconcile if the member is unreachable.
func (c *Controller) checkReachable(_ context.Context, s *state) error {
	if s.isDeleting() && (s.cluster == nil || s.member.Forced) {
		return nil
	}
	if reason := unreachableReason(s.member); reason != "" {
		s.addUnreachableResults(reason)
		return phase.Wait{Reason: reason}
	}
	if !s.isDeleting() && !s.member.HasFinalizer {
		// Without the finalizer, the cluster could be deleted before its objects are withdrawn. The controllers of clusters
		// add it.
		return phase.Wait{Reason: "the cluster has no finalizer yet"}
	}
	return nil
}

// pauseReason returns the reason why the reconciliation is paused, "" if it is not paused.
func (s *state) pauseReason() string {
	if s.member.Paused {
		return fmt.Sprintf("cluster %s is paused", s.member.Key())
	}
	if _, paused := s.summary.Annotations[libv1beta1.ProfilePausedAnnotation]; paused {
		return "the profile is paused"
	}
	return ""
}

// addUnsupportedResults adds a failed result for each feature. Deployed objects do not change.
func (s *state) addUnsupportedResults(message string) error {
	err := errors.New(message)
	s.result.FailureMessage = message
	for _, feature := range s.allWantedFeatures() {
		s.addResult(status.FeatureResult{
			Feature: feature, Kind: status.Failed, Err: err, Reason: status.ReasonUnsupported,
			Status: libv1beta1.FeatureStatusFailedNonRetriable,
		})
	}
	return phase.TerminalError{Err: err}
}

// addUnreachableResults adds a skipped result for each feature.
func (s *state) addUnreachableResults(message string) {
	s.result.FailureMessage = message
	for _, feature := range append(s.allWantedFeatures(), s.featuresToWithdraw()...) {
		s.addResult(status.FeatureResult{
			Feature: feature, Kind: status.Skipped, Err: errors.New(message), Reason: status.ReasonNotReady,
			Status: unreachableStatus(s.featureSummary(feature).Status, s.member),
		})
	}
}

// compose builds the bundles. A feature whose bundle cannot be built has a failed result and keeps its objects.
func (c *Controller) compose(ctx context.Context, s *state) error {
	request, err := c.newComposeRequest(s)
	if err != nil {
		return err
	}
	request.EnsureFinalizer = func(ctx context.Context) error { return c.ensureFinalizer(ctx, s) }
	if request.TemplateContext, err = c.loadResources(ctx, s.summary, request.TemplateContext); err != nil {
		s.addFailedResults(err)
		s.local.addFailedResults(err)
		return nil
	}
	var references []source.Reference
	var uses []source.RemoteUse
	err = s.memory.Retry(ctx, func() error {
		references = append(c.Composer.References(request), generatedReferences(request)...)
		uses = c.Composer.RemoteUses(request)
		return s.memory.TakeFailure() // without memory, templates in references are not expanded: it would not watch these
	})
	if err != nil {
		s.addFailedResults(err)
		s.local.addFailedResults(err)
		return nil
	}
	if err := c.setReferences(ctx, client.ObjectKeyFromObject(s.summary), references, uses); err != nil {
		return err
	}
	if err := c.composeFeatures(ctx, s, request.forMode(s.member.Mode)); err != nil {
		return err
	}
	return c.composeFeatures(ctx, s.local, request.forMode(fleet.Local))
}

// composeFeatures builds the bundles for the member or for the hub.
func (c *Controller) composeFeatures(ctx context.Context, s *state, request ComposeRequest) error {
	for _, feature := range s.wantedFeatures() {
		if s.isOneTimeDone(feature) {
			s.addOneTimeResult(feature)
			continue
		}
		composition, isReused, err := c.composeOrReuse(ctx, s, request, feature)
		if isReused {
			continue
		}
		if apierrors.IsConflict(err) {
			return err // the cached summary or its generated values are stale: the function result requeues the summary
		}
		if pending, ok := errors.AsType[*source.PendingError](err); ok {
			s.requeueWithin(pending.After) // the source has not responded yet: the feature keeps its status
			continue
		}
		if err != nil {
			s.addFailedResult(feature, err)
			continue
		}
		s.compositions = append(s.compositions, composition)
	}
	return nil
}

// isOneTimeDone returns whether the member has deployed a feature with syncMode OneTime, so that it is not delivered
// again. It is false after a deployment in another mode: one more delivery stops the correction of its drift.
func (s *state) isOneTimeDone(feature libv1beta1.FeatureID) bool {
	deployed, ok := s.deployed[feature]
	if s.isDeleting() || s.spec().SyncMode != configv1beta1.SyncModeOneTime || !ok || deployed.CorrectDrift || deployed.Removing {
		return false
	}
	// During the first delivery the report is pending, and the status is Provisioning. With any other status here, the
	// report of a completed delivery was lost, and the member sends it again.
	reported := s.featureSummary(feature).Status
	isReportLost := deployed.Report.State == bundle.StatePending && (reported == libv1beta1.FeatureStatusProvisioned || reported == "")
	return deployed.Report.State == bundle.StateApplied || isReportLost
}

// addOneTimeResult adds a result for a OneTime feature that the member has applied and whose status was lost.
func (s *state) addOneTimeResult(feature libv1beta1.FeatureID) {
	deployed := s.deployed[feature]
	if s.featureSummary(feature).Status == libv1beta1.FeatureStatusProvisioned || deployed.Report.State != bundle.StateApplied {
		return
	}
	var releases []configv1beta1.HelmChartSummary
	if feature == libv1beta1.FeatureHelm {
		releases = managedReleases(s.summary)
	}
	s.addResult(status.FeatureResult{Feature: feature, Kind: status.Delivered, DesiredDigest: deployed.Report.Digest, Report: deployed.Report, Releases: releases})
}

// composeOrReuse builds the bundle of a feature. If the delivered bundle was built from the same inputs, it adds the
// result of that bundle instead, and isReused is true.
func (c *Controller) composeOrReuse(ctx context.Context, s *state, request ComposeRequest, feature libv1beta1.FeatureID) (composition Composition, isReused bool, err error) {
	if feature == libv1beta1.FeatureHelm {
		if request, err = c.loadConflicts(ctx, s, request); err != nil {
			return Composition{}, false, err
		}
	}
	inputs, err := c.inputsOf(ctx, s, request, feature)
	if err != nil {
		return Composition{}, false, err
	}
	if isReused, err = c.reuseDelivered(ctx, s, feature, inputs); isReused || err != nil {
		return Composition{}, isReused, err
	}
	if err := c.raisePriority(ctx, s, s.deployed[feature].Inputs, inputs); err != nil {
		return Composition{}, false, err
	}
	if composition, err = c.composeFeature(ctx, s, request, feature); err != nil {
		return Composition{}, false, err
	}
	composition.Bundle.Inputs, err = inputs.digestFor(composition)
	return composition, false, err
}

// loadConflicts returns request with the conflicts of the summary's releases.
func (c *Controller) loadConflicts(ctx context.Context, s *state, request ComposeRequest) (ComposeRequest, error) {
	loaded, err := c.loadClusterSummaries(ctx, s.summary)
	if err != nil {
		return request, err
	}
	if loaded.isPartial {
		s.requeueWithin(unexpandedInterval) // no watch reports that the name can be expanded again
	}
	if err := c.restoreReleaseStatus(ctx, s.member, loaded); err != nil {
		return request, err
	}
	request.charts, request.hasUnknownConflicts = loaded.summary.Spec.ClusterProfileSpec.HelmCharts, loaded.isPartial
	request.Conflicts = match.FindConflicts(loaded.summary, loaded.all)
	return request, nil
}

// composeFeature builds the bundle of a feature, or returns a conflictError if continueOnConflict does not allow one.
func (c *Controller) composeFeature(ctx context.Context, s *state, request ComposeRequest, feature libv1beta1.FeatureID) (Composition, error) {
	if len(request.Conflicts) > 0 && !s.spec().ContinueOnConflict {
		return Composition{}, &conflictError{conflicts: request.Conflicts}
	}
	var composition Composition
	if err := request.TemplateContext.Memory.Retry(ctx, func() (err error) {
		composition, err = c.Composer.Compose(ctx, request, feature)
		return err
	}); err != nil {
		return Composition{}, err
	}
	composition.Releases = markConflicts(withUninstallEntries(composition.Releases, request.charts), request.Conflicts)
	return composition, nil
}

// addFailedResults adds a failed result for each wanted feature that is not isOneTimeDone.
func (s *state) addFailedResults(err error) {
	for _, feature := range s.wantedFeatures() {
		if s.isOneTimeDone(feature) {
			s.addOneTimeResult(feature)
			continue
		}
		s.addFailedResult(feature, err)
	}
}

// addFailedResult adds the failed result of a feature whose bundle could not be built.
func (s *state) addFailedResult(feature libv1beta1.FeatureID, err error) {
	if _, ok := errors.AsType[*sandbox.LimitError](err); ok {
		s.isProfileSlow = true
	}
	if kube.IsMemoryError(err) && !s.memory.IsErrorOfOther(err) {
		s.isClusterSlow = true // not isProfileSlow, since memory is limited per namespace of clusters
	}
	featureResult := status.FeatureResult{
		Feature: feature, Kind: status.Failed, Err: err, Reason: eventReasonOfError(err), Status: libv1beta1.FeatureStatusFailed,
	}
	var invalid phase.TerminalError
	if errors.As(err, &invalid) {
		featureResult.Status = libv1beta1.FeatureStatusFailedNonRetriable
	} else {
		s.retryErr = errors.Join(s.retryErr, fmt.Errorf("%s of %s: %w", feature, client.ObjectKeyFromObject(s.summary), err))
	}
	if errors.Is(err, source.ErrUnverified) {
		s.recheckAfter = unverifiedInterval
	}
	var conflict *conflictError
	if errors.As(err, &conflict) {
		featureResult.Releases = markConflicts(nil, conflict.conflicts)
	}
	s.addResult(featureResult)
}

// deliver delivers the bundles to the member, and those with deploymentType Local to the hub.
func (c *Controller) deliver(ctx context.Context, s *state) error {
	if err := c.deliverBundles(ctx, s); err != nil {
		return err
	}
	return c.deliverBundles(ctx, s.local)
}

// deliverBundles delivers the bundles of one state in order. The transport can return an error with a report. If the
// state of the report is StateFailed, the result has the message of the report, otherwise the error.
func (c *Controller) deliverBundles(ctx context.Context, s *state) error {
	for _, composition := range s.compositions {
		composition.Bundle.KeepObjects = s.hasNewerBundle(composition)
		report, err := c.Transport.Deliver(ctx, s.member, composition.Bundle)
		if ctx.Err() != nil {
			s.isClusterSlow = s.isClusterSlow || isTimeout(ctx.Err())
			return fmt.Errorf("deliver %s to %s: %w", composition.Bundle.ID, s.member.Key(), ctx.Err())
		}
		featureResult := status.FeatureResult{
			Feature: composition.Feature, Kind: status.Delivered, DesiredDigest: composition.Digest, Report: report,
			Reason: eventReasonOfReport(report), Releases: composition.Releases,
		}
		if err == nil {
			s.delivered = append(s.delivered, composition.Feature)
		} else {
			s.isClusterSlow = s.isClusterSlow || isTimeout(err)
			s.retryErr = errors.Join(s.retryErr, err)
			if report.State != bundle.StateFailed {
				featureResult.Kind, featureResult.Err, featureResult.Reason, featureResult.Status = status.Failed, err, status.ReasonDeliver, libv1beta1.FeatureStatusFailed
			}
		}
		s.addResult(featureResult)
		if recheck := c.RecheckDelay[s.member.Mode]; len(report.Outdated) > 0 && recheck > 0 {
			s.recheckAfter = recheck // the release must be rendered again, and no watch triggers that
		}
	}
	return nil
}

// hasNewerBundle returns whether a push member has applied another bundle than c, although c is Provisioned in the
// status: the hub was restored from a backup. The delivery must keep the objects that c lacks. In pull mode the agent
// detects this.
func (s *state) hasNewerBundle(c Composition) bool {
	if s.isLocal() {
		return false // the objects on the hub were restored from the same backup
	}
	old, deployed := s.featureSummary(c.Feature), s.deployed[c.Feature]
	return old.Status == libv1beta1.FeatureStatusProvisioned && s.result.HashKey.IsHashOf(old.Hash, c.Digest) &&
		deployed.Report.State == bundle.StateApplied && deployed.Report.Digest != c.Digest
}
