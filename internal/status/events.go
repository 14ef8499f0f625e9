package status

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// Reasons of failures, in failureReason and in events.
const (
	ReasonSource      = "SourceFailed"  // content or a chart could not be read
	ReasonNotFound    = "NotFound"      // a referenced object does not exist
	ReasonRender      = "RenderFailed"  // content or a chart could not be rendered
	ReasonDeliver     = "DeliverFailed" // the member or its delivery namespace could not be reached
	ReasonApply       = "ApplyFailed"   // an object could not be applied
	ReasonConflict    = "Conflict"      // another profile manages an object or a release
	ReasonUnsupported = "Unsupported"   // the profile has a field that is not supported yet
	ReasonNotReady    = "NotReady"      // the cluster is not ready or not reachable
	ReasonKept        = "ObjectsKept"   // after a restore of the hub, objects are kept that are not in the profile
	// ReasonSveltos is the reason of events about a success. Sveltos uses it for all its events.
	ReasonSveltos = "Sveltos"
)

// maxNote is the API's limit for the note of an event in bytes.
const maxNote = 1024

// Event is one event to record. Type is Normal or Warning.
type Event struct{ Type, Reason, Note string }

// Events returns the events about the changes from old to updated. m is the member of the ClusterSummary.
func Events(old, updated configv1beta1.ClusterSummaryStatus, m fleet.Member) []Event {
	var events []Event
	if updated.FailureMessage != "" && updated.FailureMessage != old.FailureMessage {
		events = append(events, Event{Type: corev1.EventTypeWarning, Reason: summaryReason(updated), Note: truncate(updated.FailureMessage)})
	}
	for _, feature := range updated.FeatureSummaries {
		if feature.FailureMessage == updated.FailureMessage && updated.FailureMessage != "" {
			continue // the event of the summary has this message
		}
		if event, ok := featureEvent(FeatureOf(old, feature.FeatureID), feature, m); ok {
			events = append(events, event)
		}
	}
	return events
}

// summaryReason returns the event reason for the message of the summary: the reason of the feature with the same
// message. Without such a feature the message is about the cluster, and the reason is ReasonNotReady.
func summaryReason(s configv1beta1.ClusterSummaryStatus) string {
	for _, feature := range s.FeatureSummaries {
		if feature.FailureMessage == s.FailureMessage {
			return failureReason(feature)
		}
	}
	return ReasonNotReady
}

// featureEvent returns the event about a change of one feature; ok is false if there is none.
func featureEvent(old, updated configv1beta1.FeatureSummary, m fleet.Member) (event Event, ok bool) {
	cluster := fmt.Sprintf("%s %s", m.Type, m.Key())
	switch updated.Status {
	case libv1beta1.FeatureStatusProvisioned:
		if updated.FailureMessage != "" && old.FailureMessage != updated.FailureMessage {
			return Event{corev1.EventTypeWarning, failureReason(updated), truncate(fmt.Sprintf("Feature: %s: %s", updated.FeatureID, updated.FailureMessage))}, true
		}
		if old.Status == updated.Status {
			return Event{}, false
		}
		return Event{corev1.EventTypeNormal, ReasonSveltos, fmt.Sprintf("Feature: %s deployed to cluster %s", updated.FeatureID, cluster)}, true
	case libv1beta1.FeatureStatusRemoved:
		if old.Status == updated.Status || old.Status == "" {
			return Event{}, false
		}
		return Event{corev1.EventTypeNormal, ReasonSveltos, fmt.Sprintf("Feature: %s removed from cluster %s", updated.FeatureID, cluster)}, true
	default:
		if updated.Status == libv1beta1.FeatureStatusProvisioning && updated.FailureReason == "" {
			return Event{}, false // the message is about a wait, and nothing has failed
		}
		if updated.FailureMessage == "" || (old.FailureMessage == updated.FailureMessage && old.Status == updated.Status) {
			return Event{}, false
		}
		return Event{corev1.EventTypeWarning, failureReason(updated), truncate(fmt.Sprintf("Feature: %s: %s", updated.FeatureID, updated.FailureMessage))}, true
	}
}

// failureReason returns the event reason for the message of a feature.
func failureReason(f configv1beta1.FeatureSummary) string {
	switch {
	case f.FailureReason == ReasonConflict:
		return ReasonConflict
	case f.Status == libv1beta1.FeatureStatusFailedNonRetriable:
		return string(libv1beta1.FeatureStatusFailedNonRetriable)
	case f.FailureReason != "":
		return f.FailureReason
	default:
		return string(f.Status)
	}
}

func truncate(note string) string { return kube.Truncate(note, maxNote) }

// AbandonedEvent returns the event about objects of a profile that stay and are no longer managed. deployed has their
// kinds on the cluster, and onHub describes the objects on the hub. reason completes the sentence "cluster <name> …",
// for example "is unreachable".
func AbandonedEvent(deployed []libv1beta1.FeatureDeploymentInfo, onHub []string, m fleet.Member, reason string) Event {
	var kept []string
	for _, info := range deployed {
		kept = append(kept, fmt.Sprintf("%s (%s)", info.FeatureID, strings.Join(info.DeployedGroupVersionKind, ", ")))
	}
	note := fmt.Sprintf("cluster %s %s %s", m.Type, m.Key(), reason)
	if len(kept) > 0 {
		note += ", left there: " + strings.Join(kept, "; ")
	}
	if len(onHub) > 0 {
		note += "; left: " + strings.Join(onHub, ", ")
	}
	return Event{corev1.EventTypeWarning, "Abandoned", truncate(note)}
}

// LookupEvent returns the event about a Helm release whose templates call lookup for objects that the hub cannot
// read: objects on a pull member that do not belong to the release.
func LookupEvent(release string, m fleet.Member) Event {
	note := fmt.Sprintf("the chart of release %s looks up objects on cluster %s %s that the hub cannot read: "+
		"in pull mode lookup finds only Secrets and ConfigMaps of the release, by their names", release, m.Type, m.Key())
	return Event{corev1.EventTypeWarning, "LookupUnanswered", truncate(note)}
}

// UnsupportedMessage returns the message about unsupported fields of a profile, "" if there are none.
func UnsupportedMessage(fields []string) string {
	if len(fields) == 0 {
		return ""
	}
	return "not supported yet: " + strings.Join(fields, ", ")
}
