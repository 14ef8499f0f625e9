package members

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/survey"
)

// reportMark returns the mark of the last report of an agent in a status, "" if it has none: the hub itself writes
// Unknown.
func reportMark(status clusterv1alpha1.ClusterStatus) string {
	ready := readyOf(status)
	if ready == nil || ready.Status == metav1.ConditionUnknown {
		return ""
	}
	return wordOf(ready) + ready.Message + ready.LastTransitionTime.UTC().String()
}

// silent returns the status of a Cluster whose agent is silent.
func silent(old clusterv1alpha1.ClusterStatus, now time.Time) clusterv1alpha1.ClusterStatus {
	return stated(old, metav1.Condition{
		Status: metav1.ConditionUnknown, Reason: clusterv1alpha1.ReasonClusterStatusUnknown, Message: "the agent of the cluster does not report any more",
	}, now)
}

// unasked returns the status of a Cluster that nobody knows how to dial.
func unasked(old clusterv1alpha1.ClusterStatus, err error, now time.Time) clusterv1alpha1.ClusterStatus {
	return stated(old, metav1.Condition{
		Status: metav1.ConditionFalse, Reason: clusterv1alpha1.ReasonStatusCollectionFailed, Message: "cluster cannot be dialled: " + survey.StableMessage(err),
	}, now)
}

// unregistered returns the status of a Cluster whose registration has not written its Secret yet.
func unregistered(old clusterv1alpha1.ClusterStatus, now time.Time) clusterv1alpha1.ClusterStatus {
	return stated(old, metav1.Condition{
		Status: metav1.ConditionFalse, Reason: clusterv1alpha1.ReasonRegistrationNotFinished, Message: "its registration is not finished",
	}, now)
}

// stated returns old with another condition Ready.
func stated(old clusterv1alpha1.ClusterStatus, ready metav1.Condition, now time.Time) clusterv1alpha1.ClusterStatus {
	status := *old.DeepCopy()
	ready.Type, ready.LastTransitionTime = clusterv1alpha1.ClusterConditionReady, metav1.NewTime(now)
	if had := readyOf(old); had != nil && had.Status == ready.Status {
		ready.LastTransitionTime = had.LastTransitionTime
	}
	meta.SetStatusCondition(&status.Conditions, ready)
	return status
}

// tainted returns the taints of a Cluster that had these ones and whose condition Ready is ready, nil for none. Those
// of people stay, with the time since when they drive work away.
func tainted(had []corev1.Taint, ready *metav1.Condition, now time.Time) []corev1.Taint {
	want := ""
	switch {
	case ready == nil, ready.Status == metav1.ConditionFalse:
		want = clusterv1alpha1.TaintNotReady
	case ready.Status == metav1.ConditionUnknown:
		want = clusterv1alpha1.TaintUnreachable
	}
	since := metav1.NewTime(now.Truncate(time.Second))
	has := false
	var taints []corev1.Taint
	for _, taint := range had {
		ours := taint.Effect == corev1.TaintEffectNoSchedule && slices.Contains([]string{clusterv1alpha1.TaintNotReady, clusterv1alpha1.TaintUnreachable}, taint.Key)
		if ours && (taint.Key != want || has) {
			continue
		}
		has = has || ours
		if taint.Effect == corev1.TaintEffectNoExecute && taint.TimeAdded == nil {
			taint.TimeAdded = &since
		}
		taints = append(taints, taint)
	}
	if want != "" && !has {
		taints = append(taints, corev1.Taint{Key: want, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &since})
	}
	return taints
}
