package agent

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/localkube"
)

// oneConfigMap returns a check that passes if a ConfigMap with the name of the check exists in namespace.
func oneConfigMap(name, namespace string) []libv1beta1.ClusterCheck {
	return []libv1beta1.ClusterCheck{{
		Name:              name,
		ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "ConfigMap", Namespace: namespace, Name: name}},
		Condition:         `function evaluate() return {pass = #resources == 1, message = "there are " .. #resources} end`,
	}}
}

func TestChecksFollowTheMember(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	ns := plane.Namespace(t, "checks")
	member, err := client.New(plane.Config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	clock := clocktesting.NewFakeClock(time.Now())
	changed := make(chan checksState)
	var c *checks
	c = newChecks(plane.Config, check.Checker{}, clock, func() {
		select {
		case changed <- c.latest():
		case <-t.Context().Done():
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); c.run(ctx) }()
	defer func() { cancel(); <-ended }()
	want := func(when string, want checksState) {
		t.Helper()
		select {
		case got := <-changed:
			if got != want {
				t.Fatalf("%s: got state %+v, want %+v", when, got, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: the state does not change", when)
		}
	}
	nextRun := func() {
		for !clock.HasWaiters() {
			if t.Context().Err() != nil {
				t.Fatal(t.Context().Err())
			}
		}
		clock.Step(checksInterval)
	}
	create := func(name string) *corev1.ConfigMap {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
		if err := member.Create(t.Context(), cm); err != nil {
			t.Fatal(err)
		}
		return cm
	}

	cluster := &libv1beta1.SveltosCluster{}
	cluster.Spec.ReadinessChecks, cluster.Spec.LivenessChecks = oneConfigMap("first", ns), oneConfigMap("later", ns)
	cluster.Spec.ConsecutiveFailureThreshold = 2
	c.setCluster(cluster)
	want("at once", checksState{isKnown: true, failures: 1, message: "readiness check first: there are 0"})
	nextRun()
	want("a minute later", checksState{isKnown: true, failures: 2, message: "readiness check first: there are 0"})
	first := create("first")
	nextRun()
	want("ready, with a failing liveness check", checksState{isKnown: true, isReady: true, failures: 2, message: "liveness check later: there are 0"})
	cluster.Status.Ready = true
	create("later")
	c.setCluster(cluster)
	want("run because of the new status", checksState{isKnown: true, isReady: true})
	if err := member.Delete(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	cluster.Spec.LivenessChecks = append(cluster.Spec.LivenessChecks, oneConfigMap("more", ns)...)
	c.setCluster(cluster)
	want("run because of new checks", checksState{isKnown: true, isReady: true, failures: 1, message: "liveness check more: there are 0"})

	recreated := &libv1beta1.SveltosCluster{}
	c.setCluster(recreated)
	want("a SveltosCluster without checks", checksState{isKnown: true, isReady: true})
}

func TestChecksStateAfterRuns(t *testing.T) {
	t.Parallel()
	fails, passes := check.Result{Ready: true, Failure: "no"}, check.Result{Ready: true}
	failing := func(failures int32) checksState {
		return checksState{isKnown: true, isReady: true, failures: failures, message: "no"}
	}
	tests := map[string]struct{ got, want checksState }{
		"it passes":         {checksState{}.nextState(passes, 0), checksState{isKnown: true, isReady: true}},
		"it fails":          {checksState{}.nextState(fails, 0), failing(1)},
		"it fails again":    {failing(2).nextState(fails, 0), failing(3)},
		"the count stops":   {failing(3).nextState(fails, 0), failing(3)},
		"a lower threshold": {failing(3).nextState(fails, 1), failing(1)},
		"it passes again":   {failing(3).nextState(passes, 0), checksState{isKnown: true, isReady: true}},
		"it is not ready":   {checksState{}.nextState(check.Result{Failure: "no"}, 0), checksState{isKnown: true, failures: 1, message: "no"}},
	}
	for name, tc := range tests {
		if tc.got != tc.want {
			t.Errorf("%s: got %+v, want %+v", name, tc.got, tc.want)
		}
	}
}

func TestChecksStateIsReported(t *testing.T) {
	t.Parallel()
	status := libv1beta1.SveltosClusterStatus{Ready: true, AgentCheckFailures: 1, AgentCheckMessage: "no"}
	if s := (checksState{isReady: true, failures: 1, message: "no"}); !s.isReported(status) {
		t.Error("the same state: got false, want true")
	}
	if s := (checksState{failures: 1, message: "no"}); !s.isReported(status) {
		t.Error("a state that is not ready, after the cluster was ready: got false, want true")
	}
	if s := (checksState{isReady: true}); s.isReported(status) {
		t.Error("a check that passes again: got true, want false")
	}
	want := map[string]any{"agentCheckFailures": int32(1), "agentCheckMessage": "no"}
	if diff := cmp.Diff(want, checksState{failures: 1, message: "no"}.statusFields()); diff != "" {
		t.Errorf("status() (-want +got):\n%s", diff)
	}
	want = map[string]any{"ready": true, "agentCheckFailures": nil, "agentCheckMessage": nil}
	if diff := cmp.Diff(want, checksState{isReady: true}.statusFields()); diff != "" {
		t.Errorf("status() (-want +got):\n%s", diff)
	}
}
