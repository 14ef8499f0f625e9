package sveltosclusters

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/event"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
)

type clusterStatus = libv1beta1.SveltosClusterStatus

func TestContactIsCounted(t *testing.T) {
	t.Parallel()
	facts := fleet.Facts{Version: "v1.31.6+k3s1", APIVersions: []string{"v1"}, Complete: true}
	up := clusterStatus{Ready: true, Version: "v1.31.6+k3s1", APIVersions: []string{"v1"}, ConnectionStatus: libv1beta1.ConnectionHealthy}
	reached := func(old clusterStatus, facts fleet.Facts) clusterStatus {
		return statusOfPush(withFacts(old, facts), 0, check.Result{Ready: true})
	}
	fails := func(old clusterStatus, liveness check.Result) clusterStatus {
		return statusOfPush(withFacts(old, facts), 2, liveness)
	}
	unready, unwell := check.Result{Failure: "readiness check c: no"}, check.Result{Ready: true, Failure: "liveness check c: no"}
	with := func(change func(*clusterStatus)) clusterStatus {
		now := *up.DeepCopy()
		change(&now)
		return now
	}
	tests := map[string]struct{ got, want clusterStatus }{
		"the first contact": {reached(clusterStatus{}, facts), up},
		"one miss is not down": {
			withContactFailure(clusterStatus{}, 0, "no route"), clusterStatus{ConnectionFailures: 1, FailureMessage: "no route"},
		},
		"misses keep it ready": {withContactFailure(up, 1, "no route"), with(func(s *clusterStatus) {
			s.ConnectionStatus, s.ConnectionFailures, s.FailureMessage = libv1beta1.ConnectionDown, 1, "no route"
		})},
		"the count stops": {
			withContactFailure(clusterStatus{ConnectionFailures: 3, ConnectionStatus: libv1beta1.ConnectionDown}, 0, "x"),
			clusterStatus{ConnectionFailures: 3, ConnectionStatus: libv1beta1.ConnectionDown, FailureMessage: "x"},
		},
		"a count below nothing counts as nothing": {
			withContactFailure(clusterStatus{ConnectionFailures: -1000}, 2, "x"), clusterStatus{ConnectionFailures: 1, FailureMessage: "x"},
		},
		"contact again":           {reached(withContactFailure(up, 1, "no route"), facts), up},
		"refused, and it says so": {withFailureMessage(up, "no"), with(func(s *clusterStatus) { s.FailureMessage = "no" })},
		"a readiness check keeps it from being ready": {fails(clusterStatus{}, unready), clusterStatus{
			Version: up.Version, APIVersions: up.APIVersions, ConnectionFailures: 1, FailureMessage: "readiness check c: no",
		}},
		"nothing takes back that it is ready": {fails(up, unready), with(func(s *clusterStatus) {
			s.ConnectionFailures, s.FailureMessage = 1, "readiness check c: no"
		})},
		"a liveness check counts": {fails(up, unwell), with(func(s *clusterStatus) {
			s.ConnectionFailures, s.FailureMessage = 1, "liveness check c: no"
		})},
		"a liveness check makes it down": {fails(fails(up, unwell), unwell), with(func(s *clusterStatus) {
			s.ConnectionFailures, s.FailureMessage, s.ConnectionStatus = 2, "liveness check c: no", libv1beta1.ConnectionDown
		})},
		"it passes again": {reached(fails(fails(up, unwell), unwell), facts), up},
	}
	for name, tc := range tests {
		if diff := cmp.Diff(tc.want, tc.got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestIncompleteAPIListKeepsFormerAPIs(t *testing.T) {
	t.Parallel()
	c, name := &Controller{}, types.NamespacedName{Name: "one"}
	all, some := []string{"apps/v1", "metrics/v1"}, []string{"apps/v1"}
	for _, step := range []struct {
		what      string
		old, list []string
		complete  bool
		want      []string
	}{
		{"first contact, with gaps", nil, some, false, some},
		{"all of them", some, all, true, all},
		{"an API is away", all, some, false, all},
		{"it is still away, and the status was lost", nil, some, false, all},
		{"it is back", all, all, true, all},
		{"it was removed", all, some, true, some},
		{"with gaps, after the status was lost", nil, some, false, some},
	} {
		got := c.keepAPIVersions(name, step.old, fleet.Facts{APIVersions: step.list, Complete: step.complete}).APIVersions
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.what, diff)
		}
	}
}

func TestLostFactsTriggerAReconcile(t *testing.T) {
	t.Parallel()
	up := clusterStatus{Ready: true, Version: "v1.31.6", APIVersions: []string{"v1"}}
	for name, test := range map[string]struct {
		before, after clusterStatus
		want          bool
	}{
		"nothing changed": {up, up, false},
		"other APIs":      {up, clusterStatus{Ready: true, Version: "v1.31.6", APIVersions: []string{"v2"}}, false},
		"first contact":   {clusterStatus{}, up, false},
		"no APIs":         {up, clusterStatus{Ready: true, Version: "v1.31.6"}, true},
		"no version":      {up, clusterStatus{Ready: true, APIVersions: []string{"v1"}}, true},
		"not ready":       {up, clusterStatus{Version: "v1.31.6", APIVersions: []string{"v1"}}, true},
		"nothing":         {up, clusterStatus{}, true},
	} {
		if got := hasLostFacts(test.before, test.after); got != test.want {
			t.Errorf("%s: got %t, want %t", name, got, test.want)
		}
	}
}

func TestHeartbeatsExpire(t *testing.T) {
	t.Parallel()
	ready := clusterStatus{Ready: true}
	says := func(ready bool, failures int32) clusterStatus {
		return clusterStatus{Ready: ready, AgentCheckFailures: failures, AgentCheckMessage: "liveness check c: no"}
	}
	checked := func(old clusterStatus, connection libv1beta1.ConnectionStatus) clusterStatus {
		old.FailureMessage, old.ConnectionFailures, old.ConnectionStatus = old.AgentCheckMessage, old.AgentCheckFailures, connection
		return old
	}
	down := clusterStatus{Ready: true, ConnectionStatus: libv1beta1.ConnectionDown, ConnectionFailures: 3, FailureMessage: libv1beta1.AgentReportTooOld}
	downUnready := down
	downUnready.Ready = false
	alive := heartbeats.Liveness{State: heartbeats.Alive, HasReported: true, Remaining: time.Minute}
	unsure := heartbeats.Liveness{State: heartbeats.Unknown, HasReported: true, Remaining: time.Minute}
	silent := heartbeats.Liveness{State: heartbeats.Silent, HasReported: true}
	healthy := clusterStatus{Ready: true, ConnectionStatus: libv1beta1.ConnectionHealthy}
	tests := map[string]struct {
		old      clusterStatus
		liveness heartbeats.Liveness
		want     clusterStatus
		wantNext time.Duration
	}{
		"no report yet": {old: clusterStatus{}, liveness: alive, wantNext: time.Minute},
		"no report yet, not heard of since a restart": {old: clusterStatus{}, liveness: unsure, wantNext: time.Minute},
		"ready without a heartbeat":                   {old: ready, liveness: heartbeats.Liveness{State: heartbeats.Silent}, want: ready},
		"alive":                                       {old: ready, liveness: alive, want: healthy, wantNext: time.Minute},
		"silent":                                      {old: ready, liveness: silent, want: down},
		"heard of again":                              {old: down, liveness: alive, want: healthy, wantNext: time.Minute},
		"still silent is not news":                    {old: down, liveness: silent, want: down},
		"never heard of":                              {old: clusterStatus{}, liveness: heartbeats.Liveness{State: heartbeats.Silent}},
		"silent before it was ready":                  {old: clusterStatus{}, liveness: silent, want: downUnready},
		"still silent before it was ready":            {old: downUnready, liveness: silent, want: downUnready},
		"silent before it was ready, not heard of again yet": {old: downUnready, liveness: unsure, want: downUnready, wantNext: time.Minute},
		"silent before it was ready, heard of again": {
			old: downUnready, liveness: alive, want: clusterStatus{ConnectionStatus: libv1beta1.ConnectionHealthy}, wantNext: time.Minute,
		},
		"not heard of yet":       {old: healthy, liveness: unsure, want: healthy, wantNext: time.Minute},
		"not heard of again yet": {old: down, liveness: unsure, want: down, wantNext: time.Minute},
		"not heard of yet, down by a check": {
			old: checked(says(true, 3), libv1beta1.ConnectionDown), liveness: unsure, wantNext: time.Minute,
			want: checked(says(true, 3), libv1beta1.ConnectionDown),
		},
		"a check fails once": {
			old: says(true, 1), liveness: alive, wantNext: time.Minute,
			want: checked(says(true, 1), libv1beta1.ConnectionHealthy),
		},
		"a check fails for long": {old: says(true, 3), liveness: alive, wantNext: time.Minute, want: checked(says(true, 3), libv1beta1.ConnectionDown)},
		"fewer checks fail than none": {
			old: says(true, -5), liveness: alive, wantNext: time.Minute,
			want: clusterStatus{Ready: true, AgentCheckFailures: -5, AgentCheckMessage: "liveness check c: no", ConnectionStatus: libv1beta1.ConnectionHealthy},
		},
		"it is not ready by a check": {
			old: says(false, 2), liveness: alive, wantNext: time.Minute, want: checked(says(false, 2), libv1beta1.ConnectionHealthy),
		},
		"silent while a check keeps it from being ready": {
			old: clusterStatus{AgentCheckFailures: 1, AgentCheckMessage: "check"}, liveness: silent,
			want: clusterStatus{
				AgentCheckFailures: 1, AgentCheckMessage: "check", ConnectionStatus: libv1beta1.ConnectionDown, ConnectionFailures: 3,
				FailureMessage: libv1beta1.AgentReportTooOld,
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, next := statusOfPull(tc.old, 0, tc.liveness)
			if diff := cmp.Diff(tc.want, got); diff != "" || next != tc.wantNext {
				t.Errorf("statusOfPull() next %s, want %s (-want +got):\n%s", next, tc.wantNext, diff)
			}
		})
	}
}

func TestLabels(t *testing.T) {
	t.Parallel()
	got, changed := desiredLabels(map[string]string{"env": "prod"}, "v1.31.6+k3s1")
	want := map[string]string{"env": "prod", "projectsveltos.io/k8s-version": "v1.31.6", "sveltos-agent": "present"}
	if diff := cmp.Diff(want, got); diff != "" || !changed {
		t.Errorf("labelled() changed %t (-want +got):\n%s", changed, diff)
	}
	if _, changed := desiredLabels(got, "v1.31.6+k3s1"); changed {
		t.Error("labelled() again changed something")
	}
}

func TestEditedStatusTriggersAReconcile(t *testing.T) {
	t.Parallel()
	up := clusterStatus{Ready: true, ConnectionStatus: libv1beta1.ConnectionHealthy, Version: "v1.36.3", AgentLastReportTime: &metav1.Time{Time: time.Unix(1e9, 0)}}
	tests := map[string]struct {
		pull   bool
		change func(*clusterStatus)
		want   bool
	}{
		"pull, cleared":          {true, func(s *clusterStatus) { *s = clusterStatus{} }, true},
		"push, cleared":          {false, func(s *clusterStatus) { *s = clusterStatus{} }, true},
		"pull, the connection":   {true, func(s *clusterStatus) { s.ConnectionStatus = libv1beta1.ConnectionDown }, true},
		"pull, the failures":     {true, func(s *clusterStatus) { s.ConnectionFailures = -1 }, true},
		"push, its own finding":  {false, func(s *clusterStatus) { s.ConnectionStatus, s.ConnectionFailures = libv1beta1.ConnectionDown, 3 }, false},
		"pull, the agent's word": {true, func(s *clusterStatus) { s.AgentLastReportTime = &metav1.Time{Time: time.Unix(2e9, 0)} }, true},
		"push, an old report":    {false, func(s *clusterStatus) { s.AgentLastReportTime = &metav1.Time{Time: time.Unix(2e9, 0)} }, false},
	}
	for name, tc := range tests {
		before := &libv1beta1.SveltosCluster{Spec: libv1beta1.SveltosClusterSpec{PullMode: tc.pull}, Status: up}
		after := before.DeepCopy()
		tc.change(&after.Status)
		if got := needsContact().Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}); got != tc.want {
			t.Errorf("%s: looked at %t, want %t", name, got, tc.want)
		}
	}
}
