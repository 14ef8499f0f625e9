package status

import (
	"cmp"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// NoDependencies is the value of status.dependencies in every ClusterSummary: profiles that depend on other profiles
// are not supported.
const NoDependencies = "no dependencies"

// ResultKind is the kind of a FeatureResult.
type ResultKind string

// The kinds of results.
const (
	// Delivered means that the bundle with DesiredDigest was delivered. Report has the result on the member.
	Delivered ResultKind = "Delivered"
	// Failed means that the bundle could not be built or delivered because of Err. The bundle that was delivered before
	// is not changed.
	Failed ResultKind = "Failed"
	// Skipped means that the reconcile tried nothing because of Err, for example because the cluster is not ready. A
	// provisioned or removed feature keeps its status.
	Skipped ResultKind = "Skipped"
	// Withdrawing means that the feature is being withdrawn. If the withdrawal is delayed, Err is the reason.
	Withdrawing ResultKind = "Withdrawing"
	// Withdrawn means that the feature is withdrawn.
	Withdrawn ResultKind = "Withdrawn"
)

// FeatureResult is the result of one reconcile for one feature.
type FeatureResult struct {
	Feature libv1beta1.FeatureID
	Kind    ResultKind
	// DesiredDigest is the digest of the bundle that was delivered. It is set for Delivered.
	DesiredDigest bundle.Digest
	// Report is the newest report of the member, possibly about an older bundle. It is set for Delivered.
	Report bundle.Report
	// Err is set for Failed and Skipped, and for a Withdrawing that is delayed.
	Err error
	// Status is the new status of the feature for Failed, Skipped and Withdrawing.
	Status libv1beta1.FeatureStatus
	// Reason is the reason of a failure, one of the Reason constants. It is "" without a failure.
	Reason string
	// Releases are the Helm releases of the feature, including those with a conflict. A release that must be
	// uninstalled has no status: ComputeStatus keeps its former entry until the bundle is applied.
	Releases []configv1beta1.HelmChartSummary
}

// ReconcileResult is the result of one reconcile of a ClusterSummary. Features without a result keep their status.
type ReconcileResult struct {
	Features []FeatureResult
	// FailureMessage is the reason why the reconcile deployed no feature, "" if there is none.
	FailureMessage string
	// SuspensionReason is the reason why the reconciliation is suspended, "" if it is not suspended.
	SuspensionReason string
	// HashKey is the key of the hashes in the status.
	HashKey HashKey
}

// ComputeStatus returns the new status of a ClusterSummary: a copy of old with the result of a reconcile.
func ComputeStatus(old configv1beta1.ClusterSummaryStatus, reconcile ReconcileResult) configv1beta1.ClusterSummaryStatus {
	updated := *old.DeepCopy()
	dependencies := NoDependencies
	updated.Dependencies = &dependencies
	updated.FailureMessage = reconcile.FailureMessage
	updated.ReconciliationSuspended = reconcile.SuspensionReason != ""
	updated.SuspensionReason = reconcile.SuspensionReason
	for _, result := range reconcile.Features {
		feature := FeatureOf(updated, result.Feature)
		setFeature(&updated, computeFeature(feature, result, reconcile.HashKey))
		setDeployedKinds(&updated, result)
		setReleases(&updated, result)
	}
	return updated
}

// FeatureOf returns the summary of a feature in s. If s has none, the result has only the ID.
func FeatureOf(s configv1beta1.ClusterSummaryStatus, id libv1beta1.FeatureID) configv1beta1.FeatureSummary {
	for _, feature := range s.FeatureSummaries {
		if feature.FeatureID == id {
			return feature
		}
	}
	return configv1beta1.FeatureSummary{FeatureID: id}
}

func setFeature(s *configv1beta1.ClusterSummaryStatus, feature configv1beta1.FeatureSummary) {
	index := slices.IndexFunc(s.FeatureSummaries, func(f configv1beta1.FeatureSummary) bool { return f.FeatureID == feature.FeatureID })
	if index >= 0 {
		s.FeatureSummaries[index] = feature
		return
	}
	s.FeatureSummaries = append(s.FeatureSummaries, feature)
	slices.SortFunc(s.FeatureSummaries, func(a, b configv1beta1.FeatureSummary) int {
		return cmp.Compare(deployOrder(a.FeatureID), deployOrder(b.FeatureID))
	})
}

// deployOrder returns the position of a feature in the order of deployment.
func deployOrder(id libv1beta1.FeatureID) int {
	return slices.Index([]libv1beta1.FeatureID{libv1beta1.FeatureResources, libv1beta1.FeatureHelm, libv1beta1.FeatureKustomize}, id)
}

// computeFeature returns the summary of a feature after a reconcile with result.
func computeFeature(old configv1beta1.FeatureSummary, result FeatureResult, key HashKey) configv1beta1.FeatureSummary {
	switch result.Kind {
	case Delivered:
		return computeFromReport(old, result, key)
	case Failed:
		return withFailure(old, result)
	case Skipped:
		if old.Status == libv1beta1.FeatureStatusProvisioned || old.Status == libv1beta1.FeatureStatusRemoved {
			return old
		}
		return withResult(old, result)
	case Withdrawing:
		if result.Err != nil {
			return withFailure(old, result)
		}
		return withResult(old, result)
	case Withdrawn:
		return configv1beta1.FeatureSummary{FeatureID: old.FeatureID, Status: libv1beta1.FeatureStatusRemoved}
	default:
		return old
	}
}

// computeFromReport returns the summary of a feature whose bundle was delivered. After a report about an older bundle,
// the desired bundle is pending.
func computeFromReport(old configv1beta1.FeatureSummary, result FeatureResult, key HashKey) configv1beta1.FeatureSummary {
	report := result.Report
	isSameDigest := key.IsHashOf(old.Hash, result.DesiredDigest)
	updated := old
	updated.Hash = key.HashOf(result.DesiredDigest)
	if report.Digest != result.DesiredDigest && !isFailureReport(result) {
		return withPending(updated, isSameDigest)
	}
	switch report.State {
	case bundle.StateApplied:
		updated.Status = libv1beta1.FeatureStatusProvisioned
		// The message of an applied bundle names objects that are kept although the bundle does not contain them.
		updated.FailureMessage, updated.FailureReason, updated.ConsecutiveFailures = report.Message, "", 0
		if report.Message != "" {
			updated.FailureReason = ReasonKept
		}
		if !isSameDigest || old.Status != libv1beta1.FeatureStatusProvisioned {
			updated.LastAppliedTime = appliedTime(old, report.LastApplied)
		}
		return updated
	case bundle.StateFailed:
		result.Err, result.Reason, result.Status = reportError(report.Message), cmp.Or(result.Reason, ReasonApply), libv1beta1.FeatureStatusFailed
		if !isSameDigest {
			updated.FailureMessage = "" // so that withFailure counts a failure of a new bundle that has the same message
		}
		return withFailure(updated, result)
	case bundle.StateApplying:
		updated = withPending(updated, isSameDigest)
		if updated.Status == libv1beta1.FeatureStatusProvisioning {
			// The message names the hook or the object that a Helm release waits for.
			updated.FailureMessage = report.Message
		}
		return updated
	default:
		return withPending(updated, isSameDigest)
	}
}

// isFailureReport returns whether the report of r is about a failure of the desired bundle. This includes a report
// without a digest: the member failed before it knew the digest.
func isFailureReport(r FeatureResult) bool {
	return r.Report.State == bundle.StateFailed && (r.Report.Digest == r.DesiredDigest || r.Report.Digest == bundle.Digest{})
}

// withPending returns the summary of a feature whose bundle is not applied yet. If old is about the same bundle
// (isSameDigest), a failed feature stays failed until the member reports another result, so that retries do not change
// its status.
func withPending(old configv1beta1.FeatureSummary, isSameDigest bool) configv1beta1.FeatureSummary {
	if isSameDigest && old.Status == libv1beta1.FeatureStatusFailed {
		return old
	}
	old.Status = libv1beta1.FeatureStatusProvisioning
	old.FailureMessage, old.FailureReason = "", ""
	return old
}

// withResult returns old with the status, the error and the reason of result.
func withResult(old configv1beta1.FeatureSummary, result FeatureResult) configv1beta1.FeatureSummary {
	old.Status = result.Status
	old.FailureMessage, old.FailureReason = errorMessage(result.Err), result.Reason
	return old
}

// withFailure returns withResult, with an incremented ConsecutiveFailures if the status or the message changes. So a
// retry that fails in the same way does not change the summary.
func withFailure(old configv1beta1.FeatureSummary, result FeatureResult) configv1beta1.FeatureSummary {
	updated := withResult(old, result)
	if updated.Status != old.Status || updated.FailureMessage != old.FailureMessage {
		updated.ConsecutiveFailures++
	}
	return updated
}

// reportError is the message of a member's report as an error.
type reportError string

// Error returns the message.
func (e reportError) Error() string { return string(e) }

func errorMessage(err error) string {
	if err == nil {
		return ""
	}
	return kube.Truncate(err.Error(), kube.MaxMessage)
}

// appliedTime returns applied in whole seconds, as the API stores it. It returns the old time if applied is zero.
func appliedTime(old configv1beta1.FeatureSummary, applied time.Time) *metav1.Time {
	if applied.IsZero() {
		return old.LastAppliedTime
	}
	return &metav1.Time{Time: applied.UTC().Truncate(time.Second)}
}

// setDeployedKinds updates status.deployedGVKs. A report without kinds changes nothing, unless the bundle is applied.
func setDeployedKinds(s *configv1beta1.ClusterSummaryStatus, result FeatureResult) {
	index := slices.IndexFunc(s.DeployedGVKs, func(d libv1beta1.FeatureDeploymentInfo) bool { return d.FeatureID == result.Feature })
	switch {
	case result.Kind == Withdrawn && index >= 0:
		s.DeployedGVKs = slices.Delete(s.DeployedGVKs, index, index+1)
	case result.Kind == Delivered && (len(result.Report.Kinds) > 0 || result.Report.State == bundle.StateApplied):
		info := libv1beta1.FeatureDeploymentInfo{FeatureID: result.Feature, DeployedGroupVersionKind: result.Report.Kinds}
		if index >= 0 {
			s.DeployedGVKs[index] = info
			return
		}
		s.DeployedGVKs = append(s.DeployedGVKs, info)
		slices.SortFunc(s.DeployedGVKs, func(a, b libv1beta1.FeatureDeploymentInfo) int {
			return cmp.Compare(deployOrder(a.FeatureID), deployOrder(b.FeatureID))
		})
	}
}

// setReleases updates status.helmReleaseSummaries. Until the bundle of result is applied, it keeps the former releases
// that result does not have, or has without a status.
func setReleases(s *configv1beta1.ClusterSummaryStatus, result FeatureResult) {
	if result.Feature != libv1beta1.FeatureHelm {
		return
	}
	if result.Kind == Withdrawn {
		s.HelmReleaseSummaries = nil
		return
	}
	releases := slices.Clone(result.Releases)
	isApplied := result.Kind == Delivered && result.Report.State == bundle.StateApplied && result.Report.Digest == result.DesiredDigest
	if !isApplied {
		for _, old := range s.HelmReleaseSummaries {
			index := slices.IndexFunc(releases, func(r configv1beta1.HelmChartSummary) bool { return isSameRelease(r, old) })
			switch {
			case index < 0:
				releases = append(releases, old)
			case releases[index].Status == "":
				releases[index] = old
			}
		}
	}
	s.HelmReleaseSummaries = SortReleases(releases)
}

// SortReleases returns releases in the order of status.helmReleaseSummaries.
func SortReleases(releases []configv1beta1.HelmChartSummary) []configv1beta1.HelmChartSummary {
	sorted := slices.Clone(releases)
	slices.SortStableFunc(sorted, func(a, b configv1beta1.HelmChartSummary) int {
		return cmp.Or(cmp.Compare(a.ReleaseNamespace, b.ReleaseNamespace), cmp.Compare(a.ReleaseName, b.ReleaseName))
	})
	return sorted
}

func isSameRelease(a, b configv1beta1.HelmChartSummary) bool {
	return a.ReleaseName == b.ReleaseName && a.ReleaseNamespace == b.ReleaseNamespace
}
