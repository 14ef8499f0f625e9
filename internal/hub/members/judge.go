package members

import (
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/survey"
)

const (
	// SilenceLimit is how long the agent of a pull member may stay silent before nobody knows how the member is: so that people see it within
	// the 40 s of the Karmada surface.
	SilenceLimit = 38 * time.Second
	// comeback is how long an agent gets to be heard of when we, or the API server, could not listen before: its heartbeat, some more to
	// connect, and what two clocks may differ.
	comeback = 15 * time.Second
)

// beat is the last sign of life of an agent: when it renewed its Lease by its own clock, in microseconds, and its own word on the condition
// Ready, and when we saw the one or the other.
type beat struct {
	renewed int64
	word    string
	at      time.Time
}

// heard returns the last sign of life after a look at a Cluster and the Lease of its agent.
func (b beat) heard(cluster *clusterv1alpha1.Cluster, lease *coordinationv1.Lease, now time.Time) beat {
	seen := b
	if renewed := lease.Spec.RenewTime; renewed != nil {
		seen.renewed = renewed.UnixMicro()
	}
	if ready := readyOf(cluster.Status); ready != nil && ready.Status != metav1.ConditionUnknown {
		seen.word = wordOf(ready) + ready.Message + ready.LastTransitionTime.UTC().String()
	}
	switch {
	case b.at.IsZero():
		// We have just begun to listen. The time in the Lease is that of the member's clock, which may be wrong: an agent that is alive has time
		// to show it.
		seen.at = now.Add(comeback - SilenceLimit)
		if renewed := lease.Spec.RenewTime; renewed != nil && renewed.After(seen.at) {
			seen.at = earlier(renewed.Time, now)
		}
	case seen != b:
		seen.at = now
	}
	return seen
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// patience returns how much longer to wait for the agent of a Cluster that was last heard of at last. awaited is false if nobody is waited
// for: the Cluster was never reported on, or its agent is known to be silent.
func patience(status clusterv1alpha1.ClusterStatus, last, now time.Time) (left time.Duration, awaited bool) {
	if ready := readyOf(status); ready == nil || ready.Status == metav1.ConditionUnknown {
		return 0, false
	}
	return SilenceLimit - now.Sub(last), true
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
		Status: metav1.ConditionFalse, Reason: clusterv1alpha1.ReasonStatusCollectionFailed, Message: "cluster cannot be dialled: " + survey.Steadily(err),
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

// tainted returns the taints of a Cluster that had these ones and whose condition Ready is ready, nil for none. Those of people stay, with
// the time since when they drive work away.
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
