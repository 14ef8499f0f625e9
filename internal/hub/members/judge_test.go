package members

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

func ready(status metav1.ConditionStatus, reason string) *metav1.Condition {
	return &metav1.Condition{Type: clusterv1alpha1.ClusterConditionReady, Status: status, Reason: reason}
}

func TestTaintsFollowReady(t *testing.T) {
	t.Parallel()
	now, before := metav1.NewTime(noon), metav1.NewTime(noon.Add(-time.Hour))
	taint := func(key string, effect corev1.TaintEffect, since *metav1.Time) corev1.Taint {
		return corev1.Taint{Key: key, Effect: effect, TimeAdded: since}
	}
	notReady := func(since *metav1.Time) corev1.Taint {
		return taint(clusterv1alpha1.TaintNotReady, corev1.TaintEffectNoSchedule, since)
	}
	unreachable := func(since *metav1.Time) corev1.Taint {
		return taint(clusterv1alpha1.TaintUnreachable, corev1.TaintEffectNoSchedule, since)
	}
	cordon := taint(clusterv1alpha1.TaintUnschedulable, corev1.TaintEffectNoSchedule, nil)
	for name, c := range map[string]struct {
		had   []corev1.Taint
		ready *metav1.Condition
		want  []corev1.Taint
	}{
		"ready":                   {nil, ready("True", "ClusterReady"), nil},
		"no word of it":           {nil, nil, []corev1.Taint{notReady(&now)}},
		"not ready":               {nil, ready("False", "ClusterNotReady"), []corev1.Taint{notReady(&now)}},
		"still not ready":         {[]corev1.Taint{notReady(&before)}, ready("False", "ClusterNotReachable"), []corev1.Taint{notReady(&before)}},
		"unknown":                 {[]corev1.Taint{notReady(&before)}, ready("Unknown", "ClusterStatusUnknown"), []corev1.Taint{unreachable(&now)}},
		"twice":                   {[]corev1.Taint{unreachable(&before), unreachable(&now)}, ready("Unknown", ""), []corev1.Taint{unreachable(&before)}},
		"ready again":             {[]corev1.Taint{unreachable(&before), notReady(&before)}, ready("True", "ClusterReady"), nil},
		"people's stay":           {[]corev1.Taint{cordon, unreachable(&before)}, ready("True", ""), []corev1.Taint{cordon}},
		"people's stay in front":  {[]corev1.Taint{cordon}, ready("False", ""), []corev1.Taint{cordon, notReady(&now)}},
		"NoExecute gets its time": {[]corev1.Taint{taint("a", "NoExecute", nil)}, ready("True", ""), []corev1.Taint{taint("a", "NoExecute", &now)}},
		"NoExecute keeps it":      {[]corev1.Taint{taint("a", "NoExecute", &before)}, ready("True", ""), []corev1.Taint{taint("a", "NoExecute", &before)}},
		"our key of another effect is people's": {
			[]corev1.Taint{taint(clusterv1alpha1.TaintNotReady, "NoExecute", &before)}, ready("True", ""),
			[]corev1.Taint{taint(clusterv1alpha1.TaintNotReady, "NoExecute", &before)},
		},
	} {
		if diff := cmp.Diff(tainted(c.had, c.ready, noon), c.want); diff != "" {
			t.Errorf("%s: got -, want +\n%s", name, diff)
		}
	}
}

// look is one look at a Cluster and a Lease, so long after noon.
type look struct {
	after   time.Duration
	renewed time.Time
	ready   *metav1.Condition
}

func TestSignsOfLifeAreTimedByOurClock(t *testing.T) {
	t.Parallel()
	is, unknown := ready("True", "ClusterReady"), ready("Unknown", "ClusterStatusUnknown")
	for name, c := range map[string]struct {
		looks []look
		// want is when the agent was heard of, after noon.
		want time.Duration
	}{
		"first look, just renewed":           {[]look{{0, noon.Add(-3 * time.Second), is}}, -3 * time.Second},
		"first look, a clock ahead of ours":  {[]look{{0, noon.Add(time.Hour), is}}, 0},
		"first look, a clock behind ours":    {[]look{{0, noon.Add(-time.Hour), is}}, comeback - SilenceLimit},
		"first look, no Lease":               {[]look{{0, time.Time{}, is}}, comeback - SilenceLimit},
		"renewed, by whatever clock":         {[]look{{0, noon, is}, {10 * time.Second, noon.Add(-time.Hour), is}}, 10 * time.Second},
		"not renewed":                        {[]look{{0, noon, is}, {10 * time.Second, noon, is}}, 0},
		"the Lease is gone":                  {[]look{{0, noon, is}, {10 * time.Second, time.Time{}, is}}, 0},
		"the agent reports":                  {[]look{{0, noon, unknown}, {10 * time.Second, noon, is}}, 10 * time.Second},
		"we report, which is no sign":        {[]look{{0, noon, is}, {10 * time.Second, noon, unknown}}, 0},
		"the agent reports what it had said": {[]look{{0, noon, is}, {10 * time.Second, noon, unknown}, {20 * time.Second, noon, is}}, 0},
	} {
		var seen beat
		for _, l := range c.looks {
			lease := &coordinationv1.Lease{}
			if !l.renewed.IsZero() {
				lease.Spec.RenewTime = &metav1.MicroTime{Time: l.renewed}
			}
			cluster := &clusterv1alpha1.Cluster{Status: clusterv1alpha1.ClusterStatus{Conditions: []metav1.Condition{*l.ready}}}
			seen = seen.heard(cluster, lease, noon.Add(l.after))
		}
		if got := seen.at.Sub(noon); got != c.want {
			t.Errorf("%s: heard %s after noon, want %s", name, got, c.want)
		}
	}
}

func TestPatienceEndsOnceAndNotBeforeTheFirstReport(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		ready   *metav1.Condition
		silent  time.Duration
		left    time.Duration
		awaited bool
	}{
		"nobody said anything": {nil, time.Hour, 0, false},
		"never reported":       {ready("Unknown", clusterv1alpha1.ReasonClusterStatusNeverUpdated), time.Hour, 0, false},
		"known to be silent":   {ready("Unknown", clusterv1alpha1.ReasonClusterStatusUnknown), time.Hour, 0, false},
		"just heard":           {ready("True", ""), 0, 38 * time.Second, true},
		"heard a while ago":    {ready("False", ""), 37 * time.Second, time.Second, true},
		"silent":               {ready("True", ""), 38 * time.Second, 0, true},
	} {
		status := clusterv1alpha1.ClusterStatus{}
		if c.ready != nil {
			status.Conditions = append(status.Conditions, *c.ready)
		}
		left, awaited := patience(status, noon, noon.Add(c.silent))
		if left != c.left || awaited != c.awaited {
			t.Errorf("%s: %s left, awaited %t, want %s, %t", name, left, awaited, c.left, c.awaited)
		}
	}
}

func TestLostFactsAreNoticed(t *testing.T) {
	t.Parallel()
	up := clusterv1alpha1.ClusterStatus{
		KubernetesVersion: "v1.36.3", APIEnablements: []clusterv1alpha1.APIEnablement{{GroupVersion: "v1"}},
		Conditions: []metav1.Condition{{Type: clusterv1alpha1.ClusterConditionReady, Status: metav1.ConditionTrue}},
	}
	for name, test := range map[string]struct {
		change func(*clusterv1alpha1.ClusterStatus)
		want   bool
	}{
		"nothing changed": {func(*clusterv1alpha1.ClusterStatus) {}, false},
		"another version": {func(s *clusterv1alpha1.ClusterStatus) { s.KubernetesVersion = "v1.37.0" }, false},
		"no version":      {func(s *clusterv1alpha1.ClusterStatus) { s.KubernetesVersion = "" }, true},
		"no APIs":         {func(s *clusterv1alpha1.ClusterStatus) { s.APIEnablements = nil }, true},
		"no conditions":   {func(s *clusterv1alpha1.ClusterStatus) { s.Conditions = nil }, true},
	} {
		after := *up.DeepCopy()
		test.change(&after)
		if got := factsLost(up, after); got != test.want {
			t.Errorf("%s: got %t, want %t", name, got, test.want)
		}
		if factsLost(clusterv1alpha1.ClusterStatus{}, after) {
			t.Errorf("%s, from nothing: got that something was lost", name)
		}
	}
}
