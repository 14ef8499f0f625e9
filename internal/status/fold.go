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

// NoDependencies is what a ClusterSummary says when it waits for no other profile.
const NoDependencies = "no dependencies"

// Kind tells what a reconcile did about a feature.
type Kind string

// The kinds of finding.
const (
	// Delivered: the member was asked for the bundle with digest Want, and Report is the answer.
	Delivered Kind = "Delivered"
	// Broken: there is nothing to deliver, or it could not be delivered, because of Err. What was delivered before is untouched.
	Broken Kind = "Broken"
	// Held: nothing was tried, because of Err, which is no fault of the feature. A provisioned feature stays provisioned.
	Held Kind = "Held"
	// Leaving: the feature is being withdrawn; Err says what is in the way, if anything is.
	Leaving Kind = "Leaving"
	// Left: nothing of the feature is left on the member.
	Left Kind = "Left"
)

// Finding is what one reconcile found of one feature.
type Finding struct {
	Feature libv1beta1.FeatureID
	Kind    Kind
	Want    bundle.Digest
	Report  bundle.Report
	Err     error
	// Status is the feature's status for Broken, Held and Leaving.
	Status libv1beta1.FeatureStatus
	// Reason is one CamelCase word for the kind of failure.
	Reason string
	// Attempt says that something was tried now and failed, which counts.
	Attempt bool
	// Releases are those the feature wants on the member, or has lost, or, without a status, wants gone; only Helm has any.
	Releases []configv1beta1.HelmChartSummary
}

// Pass is everything that one reconcile of a ClusterSummary found. Features without a finding keep their status.
type Pass struct {
	Findings []Finding
	// Message says what keeps the profile as a whole from being deployed, "" if nothing does.
	Message string
	// Suspended says why nothing is being done on purpose, "" if that is not so.
	Suspended string
}

// Fold returns the status of a ClusterSummary after pass. It does not change old.
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

// FeatureOf returns what s says of a feature; of one that it does not mention, only the ID.
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

// rank orders features as they are deployed.
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
		// An applied bundle has a message if objects are kept that it lacks.
		now.FailureMessage, now.FailureReason, now.ConsecutiveFailures = report.Message, "", 0
		if report.Message != "" {
			now.FailureReason = ReasonKept
		}
		if !same || old.Status != libv1beta1.FeatureStatusProvisioned {
			now.LastAppliedTime = appliedTime(old, report.LastApplied)
		}
	case bundle.StateFailed:
		if report.Digest != finding.Want && report.Digest != (bundle.Digest{}) {
			// The failure is that of the bundle before this one.
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

// applying is a feature that the member works on. The message names the hook or the object that a Helm release waits for.
func applying(now, old configv1beta1.FeatureSummary, same bool, message string) configv1beta1.FeatureSummary {
	now = pending(now, old, same)
	if now.Status == libv1beta1.FeatureStatusProvisioning {
		now.FailureMessage = message
	}
	return now
}

// pending is a feature on its way. One that failed stays so until the member has something new to say: the next attempt alone is no news.
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

// reportError is a message of a member as an error.
type reportError string

// Error returns the member's message.
func (e reportError) Error() string { return string(e) }

func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// appliedTime returns applied as the API keeps it, in whole seconds, and what was known before where the member does not say.
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
		// What was there before is still there until the member has done with it.
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
