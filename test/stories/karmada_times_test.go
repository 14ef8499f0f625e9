package stories

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/localkube"
)

// idleFor is the time for which an idle agent is watched: six heartbeats.
const idleFor = time.Minute

// TestKarmadaTimes logs the times of registration, detection of a dead agent and deregistration, and the requests of an
// idle agent to the hub.
func TestKarmadaTimes(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	plane := w.karmadaMembers("timed")[0]
	const rounds = 3
	times := map[string][]time.Duration{}
	measure := func(what string, do func()) {
		began := time.Now()
		do()
		times[what] = append(times[what], time.Since(began).Round(10*time.Millisecond))
	}
	for range rounds {
		w.wantNoNamespaces(plane)
		measure("join, until the command ends", func() {
			w.runShell(w.hub, fmt.Sprintf("karmadactl join timed --kubeconfig=%s --cluster-kubeconfig=%s", w.hub.Kubeconfig, plane.Kubeconfig))
		})
		measure("join, then until Ready", func() { w.awaitClusterStatus("timed", "True") })
		measure("unjoin, nothing deployed", func() {
			w.runShell(w.hub, fmt.Sprintf("karmadactl unjoin timed --kubeconfig=%s --cluster-kubeconfig=%s", w.hub.Kubeconfig, plane.Kubeconfig))
		})
	}
	unregister := fmt.Sprintf("karmadactl unregister timed --cluster-kubeconfig=%s --karmada-config=%s", plane.Kubeconfig, w.hub.Kubeconfig)
	for range rounds {
		line := w.createTokenCommand()
		w.wantNoNamespaces(plane)
		measure("register, until Ready", func() { w.runShell(plane, line) })
		measure("unregister, nothing deployed", func() { w.runShell(plane, unregister) })
	}
	w.registerMember(plane)
	agent := w.startLinkedAgent(plane)
	w.eventually("the agent works", func() error {
		if agent.link.requestCounts()["PUT /apis/coordination.k8s.io/v1/namespaces/karmada-es-timed/leases/timed"]+
			agent.link.requestCounts()["PATCH /apis/coordination.k8s.io/v1/namespaces/karmada-es-timed/leases/timed"] < 2 {
			return fmt.Errorf("its requests are %v", agent.link.requestCounts())
		}
		return nil
	})
	w.awaitClusterStatus("timed", "True")
	space := "/namespaces/karmada-es-timed/"
	want := []string{
		"/apis/cluster.karmada.io/v1alpha1/clusters?metadata.name=timed", "/apis/lib.projectsveltos.io/v1beta1" + space + "configurationgroups?",
		"/apis/work.karmada.io/v1alpha1" + space + "works?",
	}
	if diff := cmp.Diff(want, agent.link.watchPaths()); diff != "" {
		t.Errorf("the agent's watches on the hub (-want +got):\n%s", diff)
	}
	agent.link.reset()
	select {
	case <-time.After(idleFor):
	case <-agent.exited:
		t.Fatal("the agent ended")
	}
	asked := agent.link.requestCounts()
	requests := 0
	for _, count := range asked {
		requests += count
	}
	agent.kill()
	measure("agent killed, until Ready is Unknown", func() { w.awaitClusterStatus("timed", "Unknown") })
	w.wantTaint("timed", "cluster.karmada.io/unreachable")

	perMinute := float64(requests) * float64(time.Minute) / float64(idleFor)
	var text strings.Builder
	for _, what := range []string{
		"register, until Ready", "join, until the command ends", "join, then until Ready", "agent killed, until Ready is Unknown", "unjoin, nothing deployed", "unregister, nothing deployed",
	} {
		slices.Sort(times[what])
		fmt.Fprintf(&text, "%-42s %s\n", what, strings.Trim(fmt.Sprint(times[what]), "[]"))
	}
	fmt.Fprintf(&text, "%-42s %.0f %v\n", "hub requests per minute of an idle agent", perMinute, asked)
	t.Logf("Clusters of Karmada, each of the rounds\n%s", text.String())

	// The limits are loose, for a busy machine. A dead agent must be detected within the first one, and an idle agent must
	// not send requests all the time.
	if missed := times["agent killed, until Ready is Unknown"][0]; missed > 60*time.Second {
		t.Errorf("a dead agent was detected after %s", missed)
	}
	for _, what := range []string{"unjoin, nothing deployed", "unregister, nothing deployed"} {
		if median := times[what][rounds/2]; median > 10*time.Second { // polling every ten seconds would take so long
			t.Errorf("%s took %s", what, median)
		}
	}
	if perMinute > 30 {
		t.Errorf("an idle agent makes %.0f requests a minute: %v", perMinute, asked)
	}
}

// wantNoNamespaces waits until the namespaces of an earlier registration are deleted, which takes Kubernetes some
// seconds.
func (w *world) wantNoNamespaces(plane *localkube.Plane) {
	w.t.Helper()
	w.eventually("the namespaces of "+plane.Name+" are deleted", func() error {
		out, err := w.try(plane, "kubectl", "get", "namespaces", "-o", "name")
		if err == nil && strings.Contains(out, "karmada-") {
			err = fmt.Errorf("namespaces still exist: %q", out)
		}
		return err
	})
}

// wantTaint waits until a Cluster has a taint.
func (w *world) wantTaint(name, taint string) {
	w.t.Helper()
	w.eventually(name+" has taint "+taint, func() error {
		cluster, err := w.readCluster(name)
		if err != nil {
			return err
		}
		for _, found := range cluster.Spec.Taints {
			if found.Key == taint {
				return nil
			}
		}
		return fmt.Errorf("it has %v", cluster.Spec.Taints)
	})
}
