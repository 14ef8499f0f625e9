package status

import (
	"cmp"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

// NoDependencies is the status.dependencies of a ClusterSummary that waits for no other profile.
const NoDependencies = "no dependencies"

// Kind is the kind of a Finding.
type Kind string

// The kinds of findings.
const (
	// Delivered means that the bundle with the digest Want was delivered, with Report as the result.
	Delivered Kind = "Delivered"
	// Broken means that the bundle could not be built or delivered because of Err. The bundle that was delivered before is
	// not changed.
	Broken Kind = "Broken"
	// Held means that the reconcile tried nothing because of Err, for example because the cluster is not ready. A
	// provisioned or removed feature keeps its status.
	Held Kind = "Held"
	// Leaving means that the feature is being withdrawn. If the withdrawal is delayed, Err is the reason.
	Leaving Kind = "Leaving"
	// Left means that the feature is withdrawn.
	Left Kind = "Left"
)

// Finding is the result of one reconcile for one feature.
type Finding struct {
	Feature libv1beta1.FeatureID
	Kind    Kind
	Want    bundle.Digest
	Report  bundle.Report
	Err     error
	// Status is the status of the feature for Broken, Held and Leaving.
	Status libv1beta1.FeatureStatus
	// Reason is the reason of a failure, one of the Reason constants.
	Reason string
	// Attempt is true if a new attempt failed. Fold then increments consecutiveFailures.
	Attempt bool
	// Releases are the Helm releases of the feature, including those with a conflict. A release that must be uninstalled
	// has no status: Fold keeps its former entry until the bundle is applied.
	Releases []configv1beta1.HelmChartSummary
}

// Pass is the result of one reconcile of a ClusterSummary. Features without a finding keep their status.
type Pass struct {
	Findings []Finding
	// Message is the reason why no feature of the profile is deployed, "" if there is none.
	Message string
	// Suspended is the reason why the reconciliation is suspended, "" if it is not.
	Suspended string
}

// Fold returns the new status of a ClusterSummary: old, changed by the findings of pass. It does not change old.
func Fold(old configv1beta1.ClusterSummaryStatus, pass Pass) configv1beta1.ClusterSummaryStatus {
	now := *old.DeepCopy()
	dependencies := NoDependencies
	now.Dependencies = &dependencies
	now.FailureMessage = pass.Message
	now.ReconciliationSuspended = pass.Suspended != ""
	now.SuspensionReason = pass.Suspended
	for _, finding := range pass.Findings {
		feature := FeatureOf(now, finding.Feature)
		setFeature(&now, foldFeature(feature, finding))
		foldKinds(&now, finding)
		foldReleases(&now, finding)
	}
	return now
}

// FeatureOf returns the summary of a feature in s, or one with only the ID if there is none.
func FeatureOf(s configv1beta1.ClusterSummaryStatus, id libv1beta1.FeatureID) configv1beta1.FeatureSummary {
	for _, feature := range s.FeatureSummaries {
		if feature.FeatureID == id {
			return feature
		}
	}
	return configv1beta1.FeatureSummary{FeatureID: id}
}

func setFeature(s *configv1beta1.ClusterSummaryStatus, feature configv1beta1.FeatureSummary) {
	at := slices.IndexFunc(s.FeatureSummaries, func(f configv1beta1.FeatureSummary) bool { return f.FeatureID == feature.FeatureID })
	if at >= 0 {
		s.FeatureSummaries[at] = feature
		return
	}
	s.FeatureSummaries = append(s.FeatureSummaries, feature)
	slices.SortFunc(s.FeatureSummaries, func(a, b configv1beta1.FeatureSummary) int {
		return cmp.Compare(rank(a.FeatureID), rank(b.FeatureID))
	})
}

// rank returns the position of a feature in the order of deployment.
func rank(id libv1beta1.FeatureID) int {
	return slices.Index([]libv1beta1.FeatureID{libv1beta1.FeatureResources, libv1beta1.FeatureHelm, libv1beta1.FeatureKustomize}, id)
}

func foldFeature(old configv1beta1.FeatureSummary, finding Finding) configv1beta1.FeatureSummary {
	switch finding.Kind {
	case Delivered:
		return foldReport(old, finding)
	case Broken:
		return failed(old, finding, finding.Status)
	case Held:
		if old.Status == libv1beta1.FeatureStatusProvisioned || old.Status == libv1beta1.FeatureStatusRemoved {
			return old
		}
		return failed(old, finding, finding.Status)
	case Leaving:
		old.Status = finding.Status
		old.FailureMessage, old.FailureReason = message(finding.Err), finding.Reason
		if finding.Attempt {
			old.ConsecutiveFailures++
		}
		return old
	case Left:
		return configv1beta1.FeatureSummary{FeatureID: old.FeatureID, Status: libv1beta1.FeatureStatusRemoved}
	default:
		return old
	}
}

func foldReport(old configv1beta1.FeatureSummary, finding Finding) configv1beta1.FeatureSummary {
	same := bundle.DigestFromBytes(old.Hash) == finding.Want
	now := old
	now.Hash = slices.Clone(finding.Want[:])
	report := finding.Report
	if report.Digest != finding.Want && report.State != bundle.StateFailed {
		report.State = bundle.StatePending
	}
	switch report.State {
	case bundle.StateApplied:
		now.Status = libv1beta1.FeatureStatusProvisioned
		// The message of an applied bundle names objects that are kept although the bundle does not contain them.
		now.FailureMessage, now.FailureReason, now.ConsecutiveFailures = report.Message, "", 0
		if report.Message != "" {
			now.FailureReason = ReasonKept
		}
		if !same || old.Status != libv1beta1.FeatureStatusProvisioned {
			now.LastAppliedTime = appliedTime(old, report.LastApplied)
		}
	case bundle.StateFailed:
		if report.Digest != finding.Want && report.Digest != (bundle.Digest{}) {
			// An earlier bundle failed.
			return pending(now, old, same)
		}
		finding.Err, finding.Reason = reportError(report.Message), cmp.Or(finding.Reason, ReasonApply)
		finding.Attempt = finding.Attempt || !same || old.Status != libv1beta1.FeatureStatusFailed || old.FailureMessage != report.Message
		now = failed(now, finding, libv1beta1.FeatureStatusFailed)
	case bundle.StateApplying:
		return applying(now, old, same, report.Message)
	default:
		return pending(now, old, same)
	}
	return now
}

// applying returns the status of a feature whose bundle is being applied. The message names the hook or the object that
// a Helm release waits for.
func applying(now, old configv1beta1.FeatureSummary, same bool, message string) configv1beta1.FeatureSummary {
	now = pending(now, old, same)
	if now.Status == libv1beta1.FeatureStatusProvisioning {
		now.FailureMessage = message
	}
	return now
}

// pending returns the status of a feature whose bundle is not applied yet. A failed feature stays failed until the
// member reports another result, so that retries do not change its status.
func pending(now, old configv1beta1.FeatureSummary, same bool) configv1beta1.FeatureSummary {
	if same && old.Status == libv1beta1.FeatureStatusFailed {
		return now
	}
	now.Status = libv1beta1.FeatureStatusProvisioning
	now.FailureMessage, now.FailureReason = "", ""
	return now
}

func failed(old configv1beta1.FeatureSummary, finding Finding, status libv1beta1.FeatureStatus) configv1beta1.FeatureSummary {
	old.Status = status
	old.FailureMessage, old.FailureReason = message(finding.Err), finding.Reason
	if finding.Attempt {
		old.ConsecutiveFailures++
	}
	return old
}

// reportError is the message of a member's report as an error.
type reportError string

// Error returns the message.
func (e reportError) Error() string { return string(e) }

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// appliedTime returns applied in whole seconds, as the API stores it, or the old time if applied is not known.
func appliedTime(old configv1beta1.FeatureSummary, applied time.Time) *metav1.Time {
	if applied.IsZero() {
		return old.LastAppliedTime
	}
	return &metav1.Time{Time: applied.UTC().Truncate(time.Second)}
}

func foldKinds(s *configv1beta1.ClusterSummaryStatus, finding Finding) {
	at := slices.IndexFunc(s.DeployedGVKs, func(d libv1beta1.FeatureDeploymentInfo) bool { return d.FeatureID == finding.Feature })
	switch {
	case finding.Kind == Left && at >= 0:
		s.DeployedGVKs = slices.Delete(s.DeployedGVKs, at, at+1)
	case finding.Kind == Delivered && (len(finding.Report.Kinds) > 0 || finding.Report.State == bundle.StateApplied):
		info := libv1beta1.FeatureDeploymentInfo{FeatureID: finding.Feature, DeployedGroupVersionKind: finding.Report.Kinds}
		if at >= 0 {
			s.DeployedGVKs[at] = info
			return
		}
		s.DeployedGVKs = append(s.DeployedGVKs, info)
		slices.SortFunc(s.DeployedGVKs, func(a, b libv1beta1.FeatureDeploymentInfo) int {
			return cmp.Compare(rank(a.FeatureID), rank(b.FeatureID))
		})
	}
}

func foldReleases(s *configv1beta1.ClusterSummaryStatus, finding Finding) {
	if finding.Feature != libv1beta1.FeatureHelm {
		return
	}
	if finding.Kind == Left {
		s.HelmReleaseSummaries = nil
		return
	}
	now := slices.Clone(finding.Releases)
	applied := finding.Kind == Delivered && finding.Report.State == bundle.StateApplied && finding.Report.Digest == finding.Want
	if !applied {
		// Releases of the former bundle stay on the member until the new bundle is applied.
		for _, old := range s.HelmReleaseSummaries {
			at := slices.IndexFunc(now, func(r configv1beta1.HelmChartSummary) bool { return sameRelease(r, old) })
			switch {
			case at < 0:
				now = append(now, old)
			case now[at].Status == "":
				now[at] = old
			}
		}
	}
	slices.SortStableFunc(now, func(a, b configv1beta1.HelmChartSummary) int {
		return cmp.Or(cmp.Compare(a.ReleaseNamespace, b.ReleaseNamespace), cmp.Compare(a.ReleaseName, b.ReleaseName))
	})
	s.HelmReleaseSummaries = now
}

func sameRelease(a, b configv1beta1.HelmChartSummary) bool {
	return a.ReleaseName == b.ReleaseName && a.ReleaseNamespace == b.ReleaseNamespace
}
