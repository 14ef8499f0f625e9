package clusters

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/clusterstatus"
)

// reportID returns a string that changes with each report of an agent, "" if the agent has not reported. Only the hub
// sets Ready to Unknown, so that status is no report.
func reportID(status clusterv1alpha1.ClusterStatus) string {
	ready := readyCondition(status)
	if ready == nil || ready.Status == metav1.ConditionUnknown {
		return ""
	}
	return conditionSummary(ready) + ready.Message + ready.LastTransitionTime.UTC().String()
}

// silentStatus returns the status of a Cluster whose agent is silent.
func silentStatus(old clusterv1alpha1.ClusterStatus, now time.Time) clusterv1alpha1.ClusterStatus {
	return withReady(old, metav1.Condition{
		Status: metav1.ConditionUnknown, Reason: clusterv1alpha1.ReasonClusterStatusUnknown, Message: "the agent of the cluster does not report any more",
	}, now)
}

// noConfigStatus returns the status of a Cluster for which ensureObserver returned err.
func noConfigStatus(old clusterv1alpha1.ClusterStatus, err error, now time.Time) clusterv1alpha1.ClusterStatus {
	return withReady(old, metav1.Condition{
		Status: metav1.ConditionFalse, Reason: clusterv1alpha1.ReasonStatusCollectionFailed, Message: "cluster cannot be dialled: " + clusterstatus.StableMessage(err),
	}, now)
}

// registeringStatus returns the status of a Cluster whose registration has not written its Secret yet.
func registeringStatus(old clusterv1alpha1.ClusterStatus, now time.Time) clusterv1alpha1.ClusterStatus {
	return withReady(old, metav1.Condition{
		Status: metav1.ConditionFalse, Reason: clusterv1alpha1.ReasonRegistrationNotFinished, Message: "its registration is not finished",
	}, now)
}

// withReady returns old with another condition Ready. The transition time changes only with the status of the
// condition.
func withReady(old clusterv1alpha1.ClusterStatus, ready metav1.Condition, now time.Time) clusterv1alpha1.ClusterStatus {
	status := *old.DeepCopy()
	ready.Type, ready.LastTransitionTime = clusterv1alpha1.ClusterConditionReady, metav1.NewTime(now)
	if former := readyCondition(old); former != nil && former.Status == ready.Status {
		ready.LastTransitionTime = former.LastTransitionTime
	}
	meta.SetStatusCondition(&status.Conditions, ready)
	return status
}

// desiredTaints returns existing with the NoSchedule taint for the condition Ready, or without it if the cluster is
// ready. Taints of users stay. A NoExecute taint without timeAdded gets the present time, because tolerationSeconds
// count from timeAdded.
func desiredTaints(existing []corev1.Taint, ready *metav1.Condition, now time.Time) []corev1.Taint {
	desiredKey := ""
	switch {
	case ready == nil, ready.Status == metav1.ConditionFalse:
		desiredKey = clusterv1alpha1.TaintNotReady
	case ready.Status == metav1.ConditionUnknown:
		desiredKey = clusterv1alpha1.TaintUnreachable
	}
	since := metav1.NewTime(now.Truncate(time.Second))
	hasDesired := false
	var taints []corev1.Taint
	for _, taint := range existing {
		isOwned := taint.Effect == corev1.TaintEffectNoSchedule && slices.Contains([]string{clusterv1alpha1.TaintNotReady, clusterv1alpha1.TaintUnreachable}, taint.Key)
		if isOwned && (taint.Key != desiredKey || hasDesired) {
			continue
		}
		hasDesired = hasDesired || isOwned
		if taint.Effect == corev1.TaintEffectNoExecute && taint.TimeAdded == nil {
			taint.TimeAdded = &since
		}
		taints = append(taints, taint)
	}
	if desiredKey != "" && !hasDesired {
		taints = append(taints, corev1.Taint{Key: desiredKey, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &since})
	}
	return taints
}
