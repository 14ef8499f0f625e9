package karmada

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	joinkarmada "github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

func TestAgentReportsAndPatchesSpec(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "report", time.Hour)
	_, _, _ = w.startAgent(func(o *Options) {
		o.APIEndpoint, o.ProxyURL, o.Provider, o.Region, o.Zones = "https://member.example:6443", "http://proxy.example:3128", "acme", "north", []string{"a", "b"}
	})
	w.wantReady()
	cluster := w.cluster()
	if cluster.Status.KubernetesVersion == "" || len(cluster.Status.APIEnablements) == 0 || cluster.Status.NodeSummary == nil {
		t.Errorf("status: got %+v", cluster.Status)
	}
	spec := cluster.Spec
	if spec.APIEndpoint != "https://member.example:6443" || spec.ProxyURL != "http://proxy.example:3128" || spec.Provider != "acme" || spec.Region != "north" ||
		strings.Join(spec.Zones, ",") != "a,b" {
		t.Errorf("spec: got %+v", spec)
	}
	lease, err := w.lease(t.Context())
	if err != nil || lease.Spec.RenewTime == nil || *lease.Spec.LeaseDurationSeconds != 40 {
		t.Errorf("Lease: got %+v and error %v", lease.Spec, err)
	}
	// The state for a start without the hub.
	if got := w.secret().Annotations; got[kube.AnnotationScope] != string(cluster.UID) || got[kube.AnnotationHub] != w.hubID {
		t.Errorf("annotations of the Secret: got %v", got)
	}

	// The agent corrects the status unknown before the next report is due.
	w.letPass(6 * time.Second)
	changed := cluster.DeepCopy()
	meta.SetStatusCondition(&changed.Status.Conditions, metav1.Condition{
		Type: clusterv1alpha1.ClusterConditionReady, Status: metav1.ConditionUnknown, Reason: clusterv1alpha1.ReasonClusterStatusUnknown, Message: "nobody reports",
	})
	if err := w.hubClient.Status().Patch(t.Context(), changed, client.MergeFrom(cluster)); err != nil {
		t.Fatal(err)
	}
	w.wantReady()
}

func TestNeedsReport(t *testing.T) {
	t.Parallel()
	ready := func(status metav1.ConditionStatus) []metav1.Condition {
		return []metav1.Condition{{Type: clusterv1alpha1.ClusterConditionReady, Status: status}}
	}
	apis := []clusterv1alpha1.APIEnablement{{GroupVersion: "v1"}}
	for name, test := range map[string]struct {
		status clusterv1alpha1.ClusterStatus
		want   bool
	}{
		"as reported":    {clusterv1alpha1.ClusterStatus{Conditions: ready("True"), KubernetesVersion: "v1.36.3", APIEnablements: apis}, false},
		"not ready":      {clusterv1alpha1.ClusterStatus{Conditions: ready("False"), KubernetesVersion: "v1.36.3", APIEnablements: apis}, false},
		"set to unknown": {clusterv1alpha1.ClusterStatus{Conditions: ready("Unknown"), KubernetesVersion: "v1.36.3", APIEnablements: apis}, true},
		"no conditions":  {clusterv1alpha1.ClusterStatus{KubernetesVersion: "v1.36.3", APIEnablements: apis}, true},
		"no version":     {clusterv1alpha1.ClusterStatus{Conditions: ready("True"), APIEnablements: apis}, true},
		"no APIs":        {clusterv1alpha1.ClusterStatus{Conditions: ready("True"), KubernetesVersion: "v1.36.3"}, true},
	} {
		if got := (&hubSession{}).needsReport(&clusterv1alpha1.Cluster{Status: test.status}); got != test.want {
			t.Errorf("%s: got %t, want %t", name, got, test.want)
		}
	}
}

func TestAgentExecutesWorks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "works", time.Hour)
	_, stop, _ := w.startAgent()
	w.createWork("one", "first")
	w.createWork("kept", "kept")
	w.wantValue("one", "first")
	w.wantValue("kept", "kept")
	w.eventually("the Work is applied", func(context.Context) error {
		work, err := w.getWork("one")
		if err == nil && (!meta.IsStatusConditionTrue(work.Status.Conditions, workv1alpha1.WorkApplied) || len(work.Status.ManifestStatuses) != 1) {
			err = fmt.Errorf("the status of the Work is %+v", work.Status)
		}
		return err
	})

	// Drift is corrected while the hub is away and after a restart.
	w.setAway(true)
	stop()
	_, stop, _ = w.startAgent()
	if err := w.memberClient.Delete(t.Context(), w.configMap("one")); err != nil {
		t.Fatal(err)
	}
	w.wantValue("one", "first")
	stop()

	// While the agent is down, one Work is deleted and one disappears.
	work, err := w.getWork("one")
	if err != nil {
		t.Fatal(err)
	}
	if err := w.hubClient.Delete(t.Context(), work); err != nil {
		t.Fatal(err)
	}
	vanished, err := w.getWork("kept")
	if err != nil {
		t.Fatal(err)
	}
	vanished.Finalizers = nil
	if err := w.hubClient.Update(t.Context(), vanished); err != nil {
		t.Fatal(err)
	}
	if err := w.hubClient.Delete(t.Context(), vanished); err != nil {
		t.Fatal(err)
	}
	w.setAway(false)
	w.startAgent()
	w.wantDeleted(w.hubClient, work)
	w.wantDeleted(w.memberClient, w.configMap("one"))
	w.wantValue("kept", "kept")
}

func TestAgentDeploysBundles(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "bundles", time.Hour)
	key, err := deliver.LoadOrCreateKey(t.Context(), w.hubClient)
	if err != nil {
		t.Fatal(err)
	}
	pull, err := deliver.NewPullTransport(w.hubClient, w.hubClient, key)
	if err != nil {
		t.Fatal(err)
	}
	w.startAgent()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "profile-karmada-bundles", Feature: "Resources"}
	b := bundle.Bundle{ID: id, Owner: bundle.Owner{Kind: "ClusterProfile", Name: "profile", Tier: bundle.DefaultTier}, Options: bundle.Options{CorrectDrift: true}, Items: []bundle.Item{{
		Objects: []*unstructured.Unstructured{{Object: map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"namespace": "default", "name": "bundles-one"}, "data": map[string]any{"key": "first"},
		}}},
	}}}
	m := fleet.FromCluster(w.cluster())
	w.eventually("the bundle is applied", func(ctx context.Context) error {
		report, err := pull.Deliver(ctx, m, b)
		if err == nil && report.State != bundle.StateApplied {
			err = fmt.Errorf("the report is %s: %s", report.State, report.Message)
		}
		return err
	})
	w.wantValue("one", "first")
	w.eventually("the bundle is withdrawn", func(ctx context.Context) error {
		done, err := pull.Withdraw(ctx, m, bundle.Withdrawal{ID: id})
		if err == nil && !done {
			err = errors.New("not done")
		}
		return err
	})
	w.wantDeleted(w.memberClient, w.configMap("one"))
}

// An idle agent sends six requests a minute, its heartbeats. Watches are reopened every few minutes.
func TestIdleAgentSendsFewRequests(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "idle", time.Hour)
	w.startAgent()
	w.createWork("one", "first")
	w.wantValue("one", "first")
	w.wantReady()
	w.letPass(5 * time.Second)
	w.takeRequests()
	w.letPass(31 * time.Second)
	seen, failed := w.takeRequests()
	beats := 0
	for _, request := range seen {
		if request == "PATCH /apis/coordination.k8s.io/v1/namespaces/karmada-es-idle/leases/idle" {
			beats++
		}
	}
	// A change of a pod or node may change a counter once.
	if beats < 2 || beats > 4 || len(seen)-beats > 1 || len(failed) > 0 {
		t.Errorf("requests in 31 s: got %v, failed %v, want three heartbeats", seen, failed)
	}
	t.Logf("requests of an idle agent in 31 s: %d", len(seen))
}

func TestAgentOfAnotherClusterEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "taken", time.Hour)
	w.patchCluster(`{"spec":{"id":"another"}}`)
	ended, _, _ := w.startAgent()
	select {
	case err := <-ended:
		want := "the cluster ID " + w.memberID + " or the cluster name taken has been registered"
		if !errors.Is(err, joinkarmada.ErrAlreadyRegistered) || err.Error() != want {
			t.Errorf("error: got %v, want %s", err, want)
		}
	case <-time.After(20 * time.Second):
		t.Error("the agent did not end")
	}
}

// An unhealthy member must not delay the heartbeats of a starting agent.
func TestAgentOfUnhealthyMemberSendsHeartbeats(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "ill", time.Hour)
	unhealthy, clock, health := &unhealthyMember{}, &shiftedClock{}, freeAddress(t)
	unhealthy.isActive.Store(true)
	_, _, _ = w.startAgent(func(o *Options) {
		o.Member, o.Clock, o.HealthAddress = unhealthy.wrap(o.Member), clock, health
		o.StatusInterval, o.LeaseDuration, o.SuccessThreshold = time.Second, 4*time.Second, time.Second
	})
	w.eventually("the Cluster is not Ready", w.hasReadyStatus(metav1.ConditionFalse))
	since := meta.FindStatusCondition(w.cluster().Status.Conditions, clusterv1alpha1.ClusterConditionReady).LastTransitionTime
	heard := w.lastHeartbeat()
	w.letPass(5 * time.Second)
	if got := w.lastHeartbeat(); !got.After(heard.Add(3 * time.Second)) {
		t.Errorf("last heartbeat: got %s, five seconds after it was %s", got, heard)
	}
	if got := meta.FindStatusCondition(w.cluster().Status.Conditions, clusterv1alpha1.ClusterConditionReady); !got.LastTransitionTime.Equal(&since) {
		t.Errorf("Ready: got %+v, want it unchanged since %s", got, since)
	}
	clock.advance(10 * time.Minute)
	w.wantProbe(health, "/healthz", http.StatusOK)
	unhealthy.isActive.Store(false)
	w.wantReady()
}

// Disabled controllers must not fail the liveness probe.
func TestAgentWithoutStatusControllerIsAlive(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "mute", 10*time.Hour)
	forward, health := &shiftedClock{}, freeAddress(t)
	_, _, _ = w.startAgent(func(o *Options) {
		o.Clock, o.HealthAddress, o.Controllers = forward, health, []string{"*", "-" + clusterStatus}
	})
	w.createWork("one", "first")
	w.wantValue("one", "first")
	forward.advance(time.Hour)
	w.wantProbe(health, "/healthz", http.StatusOK)
	if lease, err := w.lease(t.Context()); err != nil || lease.Spec.RenewTime != nil {
		t.Errorf("Lease: got %+v and error %v, want no heartbeat", lease.Spec, err)
	}
}
