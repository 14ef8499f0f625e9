package hub_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/join"
)

const (
	// sveltosLimit and karmadaLimit are the heartbeat limits in this test. Like the real limits, both are longer than the
	// time in which a hub detects an outage of its API server, and they differ enough to see one expire before the other.
	sveltosLimit = 54 * time.Second
	karmadaLimit = 30 * time.Second
	// outage is the duration of the outage of the hub's API server: longer than both limits.
	outage = sveltosLimit + 4*time.Second
	// comeback is the time until the heartbeats of live agents arrive again.
	comeback = karmadaLimit / 3
	// clockError is the time by which the clocks of members are slow.
	clockError = 2 * time.Minute
)

// renewLeases renews the Leases of these members every two seconds until stop is called. It ignores errors of the API
// server.
func (w *world) renewLeases(members ...fleet.Member) (stop func()) {
	ctx, cancel := context.WithCancel(w.Context())
	var running sync.WaitGroup
	running.Go(func() {
		wait.UntilWithContext(ctx, func(ctx context.Context) {
			for _, m := range members {
				lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: m.DeliveryNamespace, Name: m.Name}}
				at := time.Now().Add(-clockError).UTC().Format(metav1.RFC3339Micro)
				patch := client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"renewTime":"`+at+`"}}`))
				// The next heartbeat follows soon.
				_ = w.Patch(ctx, lease, patch)
			}
		}, 2*time.Second)
	})
	return func() {
		cancel()
		running.Wait()
	}
}

// createPullCluster creates a ready Cluster in pull mode.
func (w *world) createPullCluster(name string) *clusterv1alpha1.Cluster {
	w.Helper()
	cluster := w.createReadyCluster(name, clusterv1alpha1.ClusterSpec{ID: name, SyncMode: clusterv1alpha1.Pull})
	// No profile matches it.
	update(w, cluster, func(c *clusterv1alpha1.Cluster) { c.Labels = nil })
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.ExecutionSpace(name), Name: name}}
	w.must(client.IgnoreAlreadyExists(w.Create(w.Context(), lease)))
	return cluster
}

// listAlive lists the members with a healthy or ready status.
func (w *world) listAlive() ([]string, error) {
	var names []string
	var sveltos libv1beta1.SveltosClusterList
	var karmada clusterv1alpha1.ClusterList
	err := errors.Join(w.List(w.Context(), &sveltos, client.InNamespace(w.ns)), w.List(w.Context(), &karmada))
	for _, c := range sveltos.Items {
		if c.Status.ConnectionStatus == libv1beta1.ConnectionHealthy {
			names = append(names, c.Name)
		}
	}
	for _, c := range karmada.Items {
		if meta.IsStatusConditionTrue(c.Status.Conditions, clusterv1alpha1.ClusterConditionReady) {
			names = append(names, c.Name)
		}
	}
	slices.Sort(names)
	return names, err
}

// wantAlive fails if listAlive returns other members within this time.
func (w *world) wantAlive(during time.Duration, want ...string) {
	w.Helper()
	for end := time.Now().Add(during); time.Now().Before(end); <-time.After(200 * time.Millisecond) {
		names, err := w.listAlive()
		if err := errors.Join(err, checkEqual(want, names)); err != nil {
			w.Fatalf("alive: %v", err)
		}
	}
}

// waitUntilAlive waits until listAlive returns exactly these members.
func (w *world) waitUntilAlive(within time.Duration, want ...string) {
	w.Helper()
	var last error
	err := wait.PollUntilContextTimeout(w.Context(), 200*time.Millisecond, within, true, func(context.Context) (bool, error) {
		names, err := w.listAlive()
		last = errors.Join(err, checkEqual(want, names))
		return last == nil, nil
	})
	if err != nil {
		w.Fatalf("alive: %v", last)
	}
}

func TestLiveAgentsAreNotDownAfterAnOutageOrARestart(t *testing.T) {
	w, run := newRestartableWorldWith(t, "outage", hub.Options{
		HeartbeatLimits: map[fleet.Type]time.Duration{fleet.TypeSveltos: sveltosLimit, fleet.TypeKarmada: karmadaLimit},
	})
	stop := run()
	w.createConfigMap("manifests", manifest("a"))
	lives, dies, leaves := w.createReadyMember("lives", nil), w.createReadyMember("dies", nil), w.createReadyMember("leaves", w.prodLabels())
	profile := w.createProfile(nil)
	summary := w.wantProvisioned(profile, "leaves")
	alive := []fleet.Member{fleet.FromSveltosCluster(lives), fleet.FromCluster(w.createPullCluster("runs"))}
	dead := []fleet.Member{fleet.FromSveltosCluster(dies), fleet.FromSveltosCluster(leaves), fleet.FromCluster(w.createPullCluster("ends"))}
	stopBeats := w.renewLeases(append(dead, alive...)...)
	w.waitUntilAlive(waitTimeout, "dies", "ends", "leaves", "lives", "runs")

	w.must(w.plane.Kill())
	stopBeats()
	<-time.After(outage)
	w.must(w.plane.Restart(t.Context()))
	back := time.Now()
	w.wantAlive(comeback, "dies", "ends", "leaves", "lives", "runs")
	stopBeats = w.renewLeases(alive...)
	w.waitUntilAlive(waitTimeout, "dies", "leaves", "lives", "runs")
	w.waitUntilAlive(sveltosLimit-time.Since(back)+waitTimeout, "lives", "runs")
	w.wantDeliveryAfterHeartbeat(dies)
	stopBeats()
	stopBeats = w.renewLeases(append(alive, dead[0])...)
	w.wantDeregistrationByForceOnly(leaves, summary)

	stop()
	stopBeats()
	run()
	w.wantAlive(comeback, "dies", "lives", "runs")
	stopBeats = w.renewLeases(append(alive, dead[0])...)
	defer stopBeats()
	w.wantAlive(karmadaLimit, "dies", "lives", "runs")
	for _, cluster := range []client.Object{lives, &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "runs"}}} {
		w.must(w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster))
		for _, event := range w.listEvents(cluster) {
			if strings.HasPrefix(event, "Warning") {
				t.Errorf("%s: %s", cluster.GetName(), event)
			}
		}
	}
}

// wantDeliveryAfterHeartbeat creates a profile for a silent member, and fails unless the delivery follows the next
// heartbeat.
func (w *world) wantDeliveryAfterHeartbeat(member *libv1beta1.SveltosCluster) {
	w.Helper()
	w.wantCluster(member, func(s libv1beta1.SveltosClusterStatus) bool {
		return s.Ready && s.ConnectionStatus == libv1beta1.ConnectionDown && s.FailureMessage == "AgentLastReportTime is older than max allowed age." && s.ConnectionFailures == 3
	})
	update(w, member, func(c *libv1beta1.SveltosCluster) { c.Labels = map[string]string{"left": w.ns} })
	profile := w.createProfile(func(s *configv1beta1.ProfileSpec) { s.ClusterSelector.MatchLabels = map[string]string{"left": w.ns} })
	w.wantFeature(profile, member.Name, configv1beta1.FeatureSummary{
		FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusProvisioning, FailureMessage: "agent in managed cluster is not healthy.",
	})
	if got := w.refs(member.Name, "Resources"); got != nil {
		w.Errorf("objects on %s: %v", member.Name, got)
	}
	w.renewLease(member, time.Now())
	w.wantCluster(member, func(s libv1beta1.SveltosClusterStatus) bool {
		return s.ConnectionStatus == libv1beta1.ConnectionHealthy && s.FailureMessage == "" && s.ConnectionFailures == 0
	})
	w.wantProvisioned(profile, member.Name)
}

// wantDeregistrationByForceOnly deregisters a silent member with a deployed profile.
func (w *world) wantDeregistrationByForceOnly(member *libv1beta1.SveltosCluster, summary *configv1beta1.ClusterSummary) {
	w.Helper()
	request := join.DeregisterRequest{Request: join.Request{Namespace: w.ns, Name: member.Name}, Wait: time.Second}
	_, err := join.Deregister(w.Context(), w.plane.Config, request)
	if err == nil || !errors.Is(err, join.ErrStillDeregistering) || !strings.Contains(err.Error(), "ClusterSummary "+w.ns+"/"+summary.Name+" to be withdrawn") ||
		!strings.Contains(err.Error(), "has not reported since") {
		w.Errorf("err = %v", err)
	}
	if got := w.withdrawals(); got != nil {
		w.Errorf("withdrawn: %v", got)
	}
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(member), member))
	registered := w.registrationObjects(member.Name, fleet.FromSveltosCluster(member).DeliveryNamespace)
	w.wantObjects(registered)

	request.Force = true
	result, err := join.Deregister(w.Context(), w.plane.Config, request)
	w.must(err)
	if err := checkEqual([]string{"ConfigMap default/a", "the agent, in namespace projectsveltos"}, result.Left); err != nil || !result.Forced {
		w.Errorf("left objects: %v, forced: %t", err, result.Forced)
	}
	w.wantNoObjects(registered)
	w.eventually("event", func() error {
		want := "Warning Abandoned cluster Sveltos " + w.ns + "/" + member.Name + " is unreachable and is force-deregistered; nothing was withdrawn from it, left there: Resources (ConfigMap.v1.)"
		if all := w.listEvents(summary); !slices.Contains(all, want) {
			return fmt.Errorf("events are %q", all)
		}
		return nil
	})
}
