package sveltosclusters_test

import (
	"context"
	"errors"
	"io/fs"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/api/crds"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/sveltosclusters"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// start is a Friday at noon.
var start = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// world is a hub with one member, the hub's own cluster. Tests call Reconcile of its controller.
type world struct {
	testing.TB
	client.Client
	ns         string
	clock      *clocktesting.FakeClock
	events     *events.FakeRecorder
	controller *sveltosclusters.Controller
	cluster    *libv1beta1.SveltosCluster
	// away is true if the hub's API server does not answer; otherwise it has answered since back.
	away bool
	back time.Time
}

func newWorld(t *testing.T, spec libv1beta1.SveltosClusterSpec) *world {
	t.Helper()
	plane := localkube.Shared(t)
	hub, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	installCRD(t, hub)
	w := &world{
		TB: t, Client: hub, ns: plane.Namespace(t, "clusters"), clock: clocktesting.NewFakeClock(start), events: events.NewFakeRecorder(100),
	}
	w.controller = &sveltosclusters.Controller{
		Hub: hub, MemberConfig: func(context.Context, fleet.Member) (*rest.Config, error) { return plane.Config, nil },
		Forget: func(string) {}, Events: w.events, Clock: w.clock,
	}
	w.startMonitor()
	w.cluster = &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one", Finalizers: []string{"example.com/test"}}, Spec: spec,
	}
	w.must(hub.Create(t.Context(), w.cluster))
	t.Cleanup(func() {
		w.cluster.Finalizers = nil
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		if err := hub.Patch(context.WithoutCancel(t.Context()), w.cluster, patch); err != nil {
			t.Error(err)
		}
	})
	return w
}

// startMonitor replaces the Heartbeats of the controller, as after a restart of the hub.
func (w *world) startMonitor() {
	w.controller.Heartbeats = &heartbeats.Monitor{Hub: w.Client, Live: w.Client, Clock: w.clock, AvailableSince: func() time.Time {
		if w.away {
			return w.clock.Now()
		}
		return w.back
	}}
}

// crdOnce serves the tests of this binary, which share a control plane.
var crdOnce sync.Mutex

func installCRD(t *testing.T, hub client.Client) {
	t.Helper()
	crdOnce.Lock()
	defer crdOnce.Unlock()
	files, err := fs.Glob(crds.FS, "*_sveltosclusters.yaml")
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	text, err := fs.ReadFile(crds.FS, files[0])
	if err != nil {
		t.Fatal(err)
	}
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.Unmarshal(text, crd); err != nil {
		t.Fatal(err)
	}
	if err := hub.Create(t.Context(), crd); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	err = wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		return hub.List(ctx, &libv1beta1.SveltosClusterList{}) == nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// reconcile runs the controller once, and returns the status and RequeueAfter.
func (w *world) reconcile() (libv1beta1.SveltosClusterStatus, time.Duration) {
	w.Helper()
	result, err := w.controller.Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
	w.must(err)
	w.cluster = w.cluster.DeepCopy()
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	return w.cluster.Status, result.RequeueAfter
}

// want reconciles and checks the connection in the status.
func (w *world) want(ready bool, connection libv1beta1.ConnectionStatus, failures int32, message string) {
	w.Helper()
	got, _ := w.reconcile()
	if got.Ready != ready || got.ConnectionStatus != connection || got.ConnectionFailures != failures || got.FailureMessage != message {
		w.Errorf("ready %t, connection %q after %d failures: %q, want %t, %q, %d, %q", got.Ready, got.ConnectionStatus, got.ConnectionFailures,
			got.FailureMessage, ready, connection, failures, message)
	}
}

// takeEvents returns the events since the last call.
func (w *world) takeEvents() string {
	var all []string
	for {
		select {
		case event := <-w.events.Events:
			all = append(all, strings.ReplaceAll(event, w.ns, "ns"))
		default:
			return strings.Join(all, "\n")
		}
	}
}

func (w *world) wantEvents(want string) {
	w.Helper()
	if got := w.takeEvents(); got != want {
		w.Errorf("events are %q, want %q", got, want)
	}
}

// change changes the spec.
func (w *world) change(change func(*libv1beta1.SveltosClusterSpec)) {
	w.Helper()
	before := w.cluster.DeepCopy()
	change(&w.cluster.Spec)
	w.must(w.Patch(w.Context(), w.cluster, client.MergeFrom(before)))
}

func (w *world) configMap(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}}
}

// exists returns a check that passes if a ConfigMap of this name exists.
func (w *world) exists(name string) []libv1beta1.ClusterCheck {
	return []libv1beta1.ClusterCheck{{
		Name:              name,
		ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "ConfigMap", Namespace: w.ns, Name: name}},
		Condition:         `function evaluate() return {pass = #resources == 1, message = "there are " .. #resources} end`,
	}}
}

const (
	healthy = libv1beta1.ConnectionHealthy
	down    = libv1beta1.ConnectionDown
)

func TestReadinessOfAPushMemberNeedsItsChecks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{ConsecutiveFailureThreshold: 2})
	w.change(func(s *libv1beta1.SveltosClusterSpec) {
		s.ReadinessChecks, s.LivenessChecks = w.exists("first"), w.exists("later")
	})
	w.want(false, "", 1, "readiness check first: there are 0")
	if _, next := w.reconcile(); next != 10*time.Second {
		t.Errorf("it looks again after %s, want 10s", next)
	}
	if w.cluster.Status.Version == "" || w.cluster.Labels["projectsveltos.io/k8s-version"] == "" {
		t.Errorf("nothing is known of a member that does not pass: %+v", w.cluster)
	}
	w.must(w.Create(t.Context(), w.configMap("first")))
	w.must(w.Create(t.Context(), w.configMap("later")))
	w.takeEvents()
	w.want(true, healthy, 0, "")
	w.wantEvents("Normal Ready cluster ns/one is ready, Kubernetes v1.36.3")
	w.must(w.Delete(t.Context(), w.configMap("first")))
	w.want(true, healthy, 0, "")
	w.must(w.Delete(t.Context(), w.configMap("later")))
	w.want(true, healthy, 1, "liveness check later: there are 0")
	w.want(true, down, 2, "liveness check later: there are 0")
	w.wantEvents("Warning Down cluster ns/one is down: liveness check later: there are 0")
	w.want(true, down, 2, "liveness check later: there are 0")
	w.must(w.Create(t.Context(), w.configMap("later")))
	w.want(true, healthy, 0, "")
	w.wantEvents("Normal Healthy cluster ns/one is healthy again")
}

func TestChecksOfTheAgentDecideForAPullMember(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{PullMode: true, ConsecutiveFailureThreshold: 2})
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}, Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: start}},
	}
	w.must(w.Create(t.Context(), lease))
	report := func(status string) {
		t.Helper()
		w.must(w.Status().Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(`{"status":`+status+`}`))))
	}
	w.want(false, "", 0, "")
	report(`{"agentCheckFailures":1,"agentCheckMessage":"readiness check c: no","failureMessage":"readiness check c: no"}`)
	w.want(false, healthy, 1, "readiness check c: no")
	report(`{"ready":true,"agentCheckFailures":null,"agentCheckMessage":null,"failureMessage":null}`)
	w.want(true, healthy, 0, "")
	report(`{"agentCheckFailures":1,"agentCheckMessage":"liveness check c: no"}`)
	w.want(true, healthy, 1, "liveness check c: no")
	report(`{"agentCheckFailures":2,"agentCheckMessage":"liveness check c: still no"}`)
	w.want(true, down, 2, "liveness check c: still no")
	w.clock.Step(heartbeats.SveltosLimit)
	w.want(true, down, 2, libv1beta1.AgentReportTooOld)
	lease.Spec.RenewTime = &metav1.MicroTime{Time: w.clock.Now()}
	w.must(w.Update(t.Context(), lease))
	w.want(true, down, 2, "liveness check c: still no")
	report(`{"agentCheckFailures":null,"agentCheckMessage":null,"failureMessage":null}`)
	w.want(true, healthy, 0, "")
}

func TestActiveWindowPausesByTheClock(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{PullMode: true, ActiveWindow: &libv1beta1.ActiveWindow{From: "0 13 * * *", To: "30 13 * * *"}})
	wantTurn := func(paused bool, after time.Duration, unpause, pause string) {
		t.Helper()
		status, next := w.reconcile()
		if w.cluster.Spec.Paused != paused || next != after || shown(status.NextUnpause) != unpause || shown(status.NextPause) != pause {
			t.Errorf("paused %t, looks again after %s, opens %s, closes %s, want %t, %s, %s, %s", w.cluster.Spec.Paused, next,
				shown(status.NextUnpause), shown(status.NextPause), paused, after, unpause, pause)
		}
	}
	wantTurn(true, time.Hour, "02 13:00", "02 13:30")
	w.wantEvents("Normal Paused cluster ns/one is paused by its active window")
	w.clock.Step(time.Hour)
	wantTurn(false, 30*time.Minute, "03 13:00", "02 13:30")
	w.wantEvents("Normal Unpaused cluster ns/one is unpaused by its active window")
	w.clock.Step(10 * time.Minute)
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.Paused = true })
	wantTurn(true, 20*time.Minute, "03 13:00", "02 13:30")
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.ActiveWindow.To = "00 14 * * *" })
	wantTurn(false, 50*time.Minute, "03 13:00", "02 14:00")

	w.takeEvents()
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.ActiveWindow.To = "two" })
	wantTurn(false, 0, "", "")
	wrong := w.cluster.Status.FailureMessage
	if !strings.HasPrefix(wrong, `spec.activeWindow.to: "two" is not a cron expression: `) {
		t.Errorf("failureMessage is %q", wrong)
	}
	w.wantEvents("Warning Attention cluster ns/one: " + wrong)
	wantTurn(false, 0, "", "")
	w.wantEvents("")
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.ActiveWindow.To = "15 13 * * *" })
	w.clock.Step(10 * time.Minute)
	wantTurn(true, 22*time.Hour+40*time.Minute+time.Hour, "03 13:00", "03 13:15")
	if w.cluster.Status.FailureMessage != "" {
		t.Errorf("failureMessage is %q", w.cluster.Status.FailureMessage)
	}
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.ActiveWindow = nil })
	wantTurn(false, 0, "", "")
	if w.cluster.Status.ActiveWindowHash != nil {
		t.Error("the hash of a window that is gone stays")
	}
}

func shown(t *metav1.Time) string {
	if t == nil {
		return ""
	}
	return t.UTC().Format("02 15:04")
}

func TestAgentCannotChangeTheTimesOfItsWindow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{PullMode: true, ActiveWindow: &libv1beta1.ActiveWindow{From: "0 13 * * *", To: "30 13 * * *"}})
	_, err := join.Establish(t.Context(), w, w.cluster)
	w.must(err)
	w.reconcile()
	if !w.cluster.Spec.Paused {
		t.Fatal("the window is closed, and the cluster is not paused")
	}
	config := rest.CopyConfig(localkube.Shared(t).Config)
	config.Impersonate.UserName = "system:serviceaccount:" + w.ns + ":one"
	config.Impersonate.Groups = []string{"system:serviceaccounts", "system:authenticated"}
	agent, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	w.must(err)
	memory := w.cluster.Annotations[sveltosclusters.AnnotationWindow]
	for _, forged := range []string{
		`{"status":{"nextUnpause":"2026-01-02T11:00:00Z","nextPause":"2026-01-02T23:00:00Z","activeWindowHash":"AAAA"}}`,
		`{"status":{"nextUnpause":null,"nextPause":null,"activeWindowHash":null}}`,
		`{"metadata":{"annotations":{"` + sveltosclusters.AnnotationWindow + `":null}},"status":{"ready":true}}`,
	} {
		w.must(agent.Status().Patch(t.Context(), w.cluster.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(forged))))
		w.change(func(s *libv1beta1.SveltosClusterSpec) { s.Paused = false })
		status, _ := w.reconcile()
		if w.cluster.Spec.Paused || shown(status.NextUnpause) != "02 13:00" || shown(status.NextPause) != "02 13:30" || w.cluster.Annotations[sveltosclusters.AnnotationWindow] != memory {
			t.Errorf("%s: paused %t, status %+v, memory %q, want %q", forged, w.cluster.Spec.Paused, status, w.cluster.Annotations[sveltosclusters.AnnotationWindow], memory)
		}
	}
	memoryless := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"`+sveltosclusters.AnnotationWindow+`":null}}}`))
	if err := agent.Patch(t.Context(), w.cluster.DeepCopy(), memoryless); !apierrors.IsForbidden(err) {
		t.Errorf("the agent patches its cluster: %v, want it to be forbidden", err)
	}
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.ActiveWindow = nil })
	w.reconcile()
	if w.cluster.Annotations[sveltosclusters.AnnotationWindow] != "" {
		t.Error("the memory of a window that is gone stays")
	}
}

func TestInvalidWindowIsReportedWithOtherProblems(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{ActiveWindow: &libv1beta1.ActiveWindow{From: "one", To: "0 17 * * *"}})
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.LivenessChecks = w.exists("none") })
	status, _ := w.reconcile()
	both := "liveness check none: there are 0; spec.activeWindow.from: \"one\" is not a cron expression: "
	if !strings.HasPrefix(status.FailureMessage, both) {
		t.Errorf("failureMessage is %q, want %q", status.FailureMessage, both)
	}
	if said := w.takeEvents(); !strings.Contains(said, "Warning Attention cluster ns/one: spec.activeWindow.from: ") {
		t.Errorf("events are %q", said)
	}
	w.want(true, "", 2, status.FailureMessage)
	w.want(true, down, 3, status.FailureMessage)
	w.wantEvents("Warning Down cluster ns/one is down: " + status.FailureMessage)
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.ActiveWindow = nil })
	w.want(true, down, 3, "liveness check none: there are 0")
}

func TestReadyPullMemberHasOneEvent(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]string{
		"at once":                       `{}`,
		"after a check kept it from it": `{"agentCheckFailures":1,"agentCheckMessage":"readiness check c: no"}`,
	} {
		w := newWorld(t, libv1beta1.SveltosClusterSpec{PullMode: true})
		lease := &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}, Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: start}},
		}
		w.must(w.Create(t.Context(), lease))
		report := func(status string) {
			t.Helper()
			w.must(w.Status().Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(`{"status":`+status+`}`))))
			w.reconcile()
		}
		report(first)
		w.takeEvents()
		report(`{"ready":true,"version":"v1.36.3","agentCheckFailures":null,"agentCheckMessage":null}`)
		if got := w.takeEvents(); got != "Normal Ready cluster ns/one is ready, Kubernetes v1.36.3" {
			t.Errorf("%s: events are %q", name, got)
		}
		report(`{"agentCheckFailures":1,"agentCheckMessage":"liveness check c: no"}`)
		report(`{"agentCheckFailures":null,"agentCheckMessage":null}`)
		w.wantEvents("")
	}
}

func TestDeregistrationHasNoOutageEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{ConsecutiveFailureThreshold: 1})
	w.want(true, healthy, 0, "")
	w.must(w.Delete(t.Context(), w.cluster))
	patch := `{"status":{"failureMessage":"deregistering: waiting"}}`
	w.must(w.Status().Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(patch))))
	w.takeEvents()
	w.controller.MemberConfig = func(context.Context, fleet.Member) (*rest.Config, error) {
		return nil, errors.New("its credentials are gone")
	}
	w.want(true, down, 1, "deregistering: waiting")
	w.wantEvents("")
}

func TestUnreachableMemberHasAStableMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{})
	dialled := func(err error) func(context.Context, fleet.Member) (*rest.Config, error) {
		return func(context.Context, fleet.Member) (*rest.Config, error) { return nil, err }
	}
	w.controller.MemberConfig = dialled(&url.Error{Op: "Get", URL: "https://10.0.0.1:6443/version?timeout=9.99s", Err: context.DeadlineExceeded})
	w.want(false, "", 1, "does not answer within 10s")
	w.controller.MemberConfig = dialled(errors.New(`Get "https://10.0.0.1/version?timeout=9.98s": read tcp 10.0.0.9:51312->10.0.0.1:443: connection reset by peer`))
	w.want(false, "", 2, `Get "https://10.0.0.1/version": read tcp 10.0.0.1:443: connection reset by peer`)
	w.controller.MemberConfig = dialled(errors.New(`Get "https://[::1]/version?timeout=9.97s": read tcp [::1]:51312->[::1]:443: connection reset by peer`))
	w.want(false, down, 3, `Get "https://[::1]/version": read tcp [::1]:443: connection reset by peer`)
}

func TestFailedTokenRenewalIsReportedOnAHealthyMember(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{TokenRequestRenewalOption: &libv1beta1.TokenRequestRenewalOption{}})
	message := "renew the token: spec.tokenRequestRenewalOption.renewTokenRequestInterval is not positive"
	w.want(true, healthy, 0, message)
	w.want(true, healthy, 0, message)
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.TokenRequestRenewalOption = nil })
	w.want(true, healthy, 0, "")
}

func TestDeregistrationKeepsItsMessageAndIgnoresChecks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{ConsecutiveFailureThreshold: 1})
	w.change(func(s *libv1beta1.SveltosClusterSpec) { s.LivenessChecks = w.exists("none") })
	w.want(true, down, 1, "liveness check none: there are 0")
	w.must(w.Delete(t.Context(), w.cluster))
	patch := `{"status":{"failureMessage":"deregistering: waiting"}}`
	w.must(w.Status().Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(patch))))
	w.want(true, healthy, 0, "deregistering: waiting")
}
