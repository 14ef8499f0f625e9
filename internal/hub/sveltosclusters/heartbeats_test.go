package sveltosclusters_test

import (
	"context"
	"errors"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet/heartbeats"
)

// behind is the time by which the clock of the member is slow.
const behind = 2 * time.Minute

// newPullWorld returns a world with a ready pull member, and the Lease of its agent.
func newPullWorld(t *testing.T) (*world, *coordinationv1.Lease) {
	t.Helper()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{PullMode: true})
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}}
	w.must(w.Create(t.Context(), lease))
	w.renewLease(lease)
	report := `{"status":{"ready":true,"version":"v1.36.3","agentLastReportTime":"` + start.Add(-behind).Format(time.RFC3339) + `"}}`
	w.must(w.Status().Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(report))))
	w.want(true, healthy, 0, "")
	w.takeEvents()
	return w, lease
}

// renewLease renews the Lease by the clock of the member.
func (w *world) renewLease(lease *coordinationv1.Lease) {
	w.Helper()
	lease.Spec.RenewTime = &metav1.MicroTime{Time: w.clock.Now().Add(-behind)}
	w.must(w.Update(w.Context(), lease))
}

// unreachableReader is an API server that does not answer.
type unreachableReader struct{ client.Reader }

func (unreachableReader) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.New("it does not answer")
}

func TestOutageOfTheHubMakesNoMemberDown(t *testing.T) {
	t.Parallel()
	for name, dies := range map[string]bool{"lives": false, "dies": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, lease := newPullWorld(t)
			w.away, w.controller.Heartbeats.Live = true, unreachableReader{}
			for range 18 {
				w.clock.Step(10 * time.Second)
				w.want(true, healthy, 0, "")
			}
			w.away, w.back, w.controller.Heartbeats.Live = false, w.clock.Now(), w.Client
			w.clock.Step(heartbeats.SveltosLimit - time.Second)
			w.want(true, healthy, 0, "")
			if dies {
				w.clock.Step(time.Second)
				w.want(true, down, 3, libv1beta1.AgentReportTooOld)
				w.wantEvents("Warning Down cluster ns/one is down: " + libv1beta1.AgentReportTooOld)
				return
			}
			w.renewLease(lease)
			w.clock.Step(time.Second)
			w.want(true, healthy, 0, "")
			w.wantEvents("")
		})
	}
}

func TestRestartOfTheHubMakesNoMemberDown(t *testing.T) {
	t.Parallel()
	w, lease := newPullWorld(t)
	for range 3 {
		w.startMonitor()
		w.want(true, healthy, 0, "")
		w.clock.Step(30 * time.Second)
		w.renewLease(lease)
		w.want(true, healthy, 0, "")
	}
	w.wantEvents("")
	// The agent stops together with the hub.
	w.startMonitor()
	w.want(true, healthy, 0, "")
	w.clock.Step(heartbeats.SveltosLimit)
	w.want(true, down, 3, libv1beta1.AgentReportTooOld)
	w.wantEvents("Warning Down cluster ns/one is down: " + libv1beta1.AgentReportTooOld)
	// Only a heartbeat makes it healthy, not another restart.
	w.startMonitor()
	w.want(true, down, 3, libv1beta1.AgentReportTooOld)
	w.wantEvents("")
	w.renewLease(lease)
	w.want(true, healthy, 0, "")
	w.wantEvents("Normal Healthy cluster ns/one is healthy again")
}

func TestSilenceIsConfirmedByTheAPIServer(t *testing.T) {
	t.Parallel()
	w, _ := newPullWorld(t)
	w.clock.Step(heartbeats.SveltosLimit)
	w.controller.Heartbeats.Live = unreachableReader{}
	if _, err := w.controller.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)}); err == nil {
		t.Error("a Lease that cannot be read is no error")
	}
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	if got := w.cluster.Status.ConnectionStatus; got != healthy {
		t.Errorf("the connection is %q", got)
	}
	w.controller.Heartbeats.Live = w.Client
	w.want(true, down, 3, libv1beta1.AgentReportTooOld)
}

func TestAgentThatStopsBeforeItsFirstReportIsDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, libv1beta1.SveltosClusterSpec{PullMode: true})
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}}
	w.must(w.Create(t.Context(), lease))
	w.want(false, "", 0, "")
	w.clock.Step(time.Hour)
	w.want(false, "", 0, "")
	w.renewLease(lease)
	if _, next := w.reconcile(); next != heartbeats.SveltosLimit {
		t.Errorf("it looks again after %s, want 90s", next)
	}
	w.clock.Step(heartbeats.SveltosLimit)
	w.want(false, down, 3, libv1beta1.AgentReportTooOld)
	w.wantEvents("Warning Down cluster ns/one is down: " + libv1beta1.AgentReportTooOld)
	w.renewLease(lease)
	w.want(false, healthy, 0, "")
}
