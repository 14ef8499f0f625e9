package stories

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/localkube"
)

const deregisterProfile = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: leaving}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: delivered}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: leaving}
spec:
  clusterSelector: {matchLabels: {env: leaving}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: leaving}]
`

// TestDeregisterPull deregisters clusters in pull mode: a healthy one, one whose deployed objects must stay, one whose
// agent is stopped, one whose control plane does not run any more, and one whose deregistration is interrupted. Another
// cluster in the same namespace is not affected.
func TestDeregisterPull(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.apply(w.hub, deregisterProfile)
	neighbour := w.pullMember("fleet", "neighbour", "env=leaving")
	w.awaitDeployed(neighbour)
	w.awaitProvisioned("fleet", "leaving-sveltos-neighbour")
	w.awaitNoBundles()
	before := w.listClusterObjects("neighbour")
	// The hub marks it as Down only after 90 s without a heartbeat, while the subtests run.
	stopped := w.pullMember("fleet", "gone", "env=leaving")
	w.awaitDeployed(stopped)
	w.awaitProvisioned("fleet", "leaving-sveltos-gone")
	if err := stopped.Kill(); err != nil {
		t.Fatal(err)
	}

	t.Run("healthy", func(t *testing.T) {
		w := w.forSubtest(t)
		plane := w.pullMember("fleet", "healthy", "env=leaving")
		w.awaitDeployed(plane)
		out := w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=healthy")
		if !strings.HasPrefix(out, "Successfully deregistered cluster fleet/healthy\n\nDeleted resources:\n  - ") {
			t.Errorf("deregister printed %q", out)
		}
		w.wantWithdrawn(plane)
		w.wantNoAgent(plane)
		w.wantNoClusterObjects("healthy")
	})
	t.Run("keeping the deployed objects", func(t *testing.T) {
		w := w.forSubtest(t)
		plane := w.pullMember("fleet", "keeping", "env=leaving")
		w.awaitDeployed(plane)
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=keeping", "--keep-addons")
		w.wantNoAgent(plane)
		w.awaitDeployed(plane)
		w.wantNoClusterObjects("keeping")
	})
	t.Run("agent stopped and restarted", func(t *testing.T) {
		w := w.forSubtest(t)
		agent := w.startProcessAgent("fleet", "dead", "env=leaving")
		w.awaitDeployed(agent.plane)
		agent.process.kill()
		_, err := w.try(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=dead", "--wait=3s")
		wantError(t, err, "fleet/dead", "waiting for", "--force")
		w.awaitDeployed(agent.plane)
		agent.start()
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=dead")
		w.wantWithdrawn(agent.plane)
		w.wantNoAgent(agent.plane)
		w.wantNoClusterObjects("dead")
	})
	t.Run("interrupted half-way", func(t *testing.T) {
		outer := w // the restarted hub must run after this subtest
		w := w.forSubtest(t)
		agent := w.startProcessAgent("fleet", "halfway", "env=leaving")
		w.awaitDeployed(agent.plane)
		agent.process.kill()
		cut := w.start("deregister", w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=halfway")
		w.eventually("the deregistration has begun", func() error { return w.wantDeregistering("fleet", "halfway") })
		_ = cut.cmd.Process.Signal(os.Interrupt) // an error means that it has ended, and the exit code is checked below
		<-cut.exited
		if code := cut.cmd.ProcessState.ExitCode(); code != 130 {
			t.Errorf("an interrupted deregistration exits with %d, want 130", code)
		}
		outer.hubProcess.kill()
		agent.start()
		outer.startHub()
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=halfway")
		w.wantWithdrawn(agent.plane)
		w.wantNoAgent(agent.plane)
		w.wantNoClusterObjects("halfway")
	})
	t.Run("control plane stopped for good", func(t *testing.T) {
		w := w.forSubtest(t)
		out, err := w.tryCombined(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=gone", "--wait=3s", "--force")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out, "left behind") || !strings.Contains(out, "delivered") {
			t.Errorf("deregister --force printed %q, want the objects that it left behind", out)
		}
		w.wantNoClusterObjects("gone")
	})

	w.awaitDeployed(neighbour)
	w.awaitReady("fleet", "neighbour")
	if diff := cmp.Diff(before, w.listClusterObjects("neighbour")); diff != "" {
		t.Errorf("objects of the neighbour on the hub (-before +after):\n%s", diff)
	}
}

// TestDeregisterPush is TestDeregisterPull in push mode.
func TestDeregisterPush(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.apply(w.hub, deregisterProfile)
	w.kubectl(w.hub, "create", "namespace", "fleet")
	neighbour := w.pushMemberIn("fleet", "neighbour")
	w.awaitDeployed(neighbour)
	before := w.listClusterObjects("neighbour")

	t.Run("healthy", func(t *testing.T) {
		w := w.forSubtest(t)
		plane := w.pushMemberIn("fleet", "healthy")
		w.awaitDeployed(plane)
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=healthy")
		w.wantWithdrawn(plane)
		w.wantNoClusterObjects("healthy")
	})
	t.Run("control plane stopped", func(t *testing.T) {
		w := w.forSubtest(t)
		plane := w.pushMemberIn("fleet", "gone")
		w.awaitDeployed(plane)
		if err := plane.Kill(); err != nil {
			t.Fatal(err)
		}
		_, err := w.try(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=gone", "--wait=3s")
		wantError(t, err, "fleet/gone", "waiting for", "--force")
		out, err := w.tryCombined(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=gone", "--wait=3s", "--force")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out, "left behind") {
			t.Errorf("deregister --force printed %q, want the objects that it left behind", out)
		}
		w.wantNoClusterObjects("gone")
	})
	t.Run("hub killed half-way", func(t *testing.T) {
		outer := w // the restarted hub must run after this subtest
		w := w.forSubtest(t)
		plane := w.pushMemberIn("fleet", "halfway")
		w.awaitDeployed(plane)
		outer.hubProcess.kill()
		_, err := w.try(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=halfway", "--wait=2s")
		wantError(t, err, "fleet/halfway", "hub")
		w.awaitDeployed(plane)
		outer.startHub()
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=halfway")
		w.wantWithdrawn(plane)
		w.wantNoClusterObjects("halfway")
	})

	w.awaitDeployed(neighbour)
	if diff := cmp.Diff(before, w.listClusterObjects("neighbour")); diff != "" {
		t.Errorf("objects of the neighbour on the hub (-before +after):\n%s", diff)
	}
}

// pushMemberIn starts a member and registers it in push mode in a namespace that exists.
func (w *world) pushMemberIn(namespace, cluster string) *localkube.Plane {
	w.t.Helper()
	plane := w.member(cluster)
	w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+namespace, "--cluster="+cluster, "--kubeconfig="+plane.Kubeconfig, "--labels=env=leaving")
	w.awaitReady(namespace, cluster)
	return plane
}

// awaitDeployed waits until the profile's object is on a member.
func (w *world) awaitDeployed(plane *localkube.Plane) {
	w.t.Helper()
	w.eventually("the profile is on "+plane.Name, func() error {
		_, err := w.data(plane, "default", "delivered")
		return err
	})
}

// wantWithdrawn checks that the profile's object is not on a member: a deregistration withdraws it before it ends.
func (w *world) wantWithdrawn(plane *localkube.Plane) {
	w.t.Helper()
	if err := w.wantMissing(plane, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		w.t.Error(err)
	}
}

// wantDeregistering returns an error unless the cluster is being deregistered.
func (w *world) wantDeregistering(namespace, cluster string) error {
	found := &libv1beta1.SveltosCluster{}
	err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: cluster}, found)
	if err == nil && found.DeletionTimestamp == nil {
		err = fmt.Errorf("cluster %s/%s is not being deleted", namespace, cluster)
	}
	return err
}

// listClusterObjects lists the objects of the hub with the name of a cluster in a name, a namespace or a label.
func (w *world) listClusterObjects(cluster string) []string {
	w.t.Helper()
	var found []string
	kinds := "namespaces,sveltosclusters,serviceaccounts,secrets,roles,rolebindings,leases,clusterroles,clusterrolebindings," +
		"configurationgroups,configurationbundles,clustersummaries,clusterconfigurations"
	for line := range strings.Lines(w.kubectl(w.hub, "get", kinds, "-A", "-o", "custom-columns=KIND:.kind,NS:.metadata.namespace,NAME:.metadata.name,LABELS:.metadata.labels", "--no-headers")) {
		if strings.Contains(line, cluster) {
			fields := strings.Fields(line)
			found = append(found, strings.Join(fields[:3], " "))
		}
	}
	return found
}

// wantNoClusterObjects waits until the hub has no object of a cluster.
func (w *world) wantNoClusterObjects(cluster string) {
	w.t.Helper()
	w.eventually("the hub has no object of "+cluster, func() error {
		if found := w.listClusterObjects(cluster); len(found) > 0 {
			return fmt.Errorf("found %q", found)
		}
		return nil
	})
}

// wantError checks that a command failed with one line that has all texts.
func wantError(t *testing.T, err error, texts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("the command succeeded; want an error with %q", texts)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("error is %q, want %q in it", err, text)
		}
	}
}

// tryCombined is try, but it returns the standard output and the standard error.
func (w *world) tryCombined(plane *localkube.Plane, binary string, args ...string) (string, error) {
	cmd := w.command(plane, binary, args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, out)
	}
	return string(out), nil
}

// forSubtest returns the world for a subtest.
func (w *world) forSubtest(t *testing.T) *world {
	t.Helper()
	inner := *w
	inner.t = t
	return &inner
}
