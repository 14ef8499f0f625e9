package clusters

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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
		if diff := cmp.Diff(desiredTaints(c.had, c.ready, noon), c.want); diff != "" {
			t.Errorf("%s: got -, want +\n%s", name, diff)
		}
	}
}

func TestReportIDChangesWithAgentReportsOnly(t *testing.T) {
	t.Parallel()
	mark := func(ready *metav1.Condition, at time.Time) string {
		ready.LastTransitionTime = metav1.NewTime(at)
		return reportID(clusterv1alpha1.ClusterStatus{Conditions: []metav1.Condition{*ready}})
	}
	first := mark(ready("True", "ClusterReady"), noon)
	for name, c := range map[string]struct {
		mark    string
		changed bool
	}{
		"the same":          {mark(ready("True", "ClusterReady"), noon), false},
		"another time":      {mark(ready("True", "ClusterReady"), noon.Add(time.Second)), true},
		"another condition": {mark(ready("False", "ClusterNotReady"), noon), true},
	} {
		if changed := c.mark != first; changed != c.changed {
			t.Errorf("%s: changed %t, want %t", name, changed, c.changed)
		}
	}
	if got := mark(ready("Unknown", "ClusterStatusUnknown"), noon) + reportID(clusterv1alpha1.ClusterStatus{}); got != "" {
		t.Errorf("the hub's own word is marked: %q", got)
	}
}

func TestLostFactsTriggerAReconcile(t *testing.T) {
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
		if got := hasLostFacts(up, after); got != test.want {
			t.Errorf("%s: got %t, want %t", name, got, test.want)
		}
		if hasLostFacts(clusterv1alpha1.ClusterStatus{}, after) {
			t.Errorf("%s, from nothing: got that something was lost", name)
		}
	}
}
