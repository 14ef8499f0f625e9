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

// TestDeregisterPull takes clusters in pull mode out of the fleet: a healthy one, one whose add-ons shall stay, one
// whose agent is dead, one that is gone for good, and one whose deregistration is cut off half-way. A neighbour in the
// same namespace notices nothing.
func TestDeregisterPull(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	w.apply(w.hub, deregisterProfile)
	neighbour := w.pullMember("fleet", "neighbour", "env=leaving")
	w.has(neighbour)
	w.provisioned("fleet", "leaving-sveltos-neighbour")
	w.bundlesGone()
	before := w.traces("neighbour")
	// It is missed only after 90 s of silence, which go by while the others leave.
	gone := w.pullMember("fleet", "gone", "env=leaving")
	w.has(gone)
	w.provisioned("fleet", "leaving-sveltos-gone")
	if err := gone.Kill(); err != nil {
		t.Fatal(err)
	}

	t.Run("healthy", func(t *testing.T) {
		w := w.in(t)
		plane := w.pullMember("fleet", "healthy", "env=leaving")
		w.has(plane)
		out := w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=healthy")
		if !strings.HasPrefix(out, "Successfully deregistered cluster fleet/healthy\n\nDeleted resources:\n  - ") {
			t.Errorf("deregister printed %q", out)
		}
		w.hasNot(plane)
		w.wantNoAgent(plane)
		w.wantNoTrace("healthy")
	})
	t.Run("keeping what is deployed", func(t *testing.T) {
		w := w.in(t)
		plane := w.pullMember("fleet", "keeping", "env=leaving")
		w.has(plane)
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=keeping", "--keep-addons")
		w.wantNoAgent(plane)
		w.has(plane)
		w.wantNoTrace("keeping")
	})
	t.Run("agent dead, and back", func(t *testing.T) {
		w := w.in(t)
		agent := w.looseAgent("fleet", "dead", "env=leaving")
		w.has(agent.plane)
		agent.process.kill()
		_, err := w.try(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=dead", "--wait=3s")
		wantError(t, err, "fleet/dead", "waiting for", "--force")
		w.has(agent.plane)
		agent.start()
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=dead")
		w.hasNot(agent.plane)
		w.wantNoAgent(agent.plane)
		w.wantNoTrace("dead")
	})
	t.Run("interrupted half-way", func(t *testing.T) {
		outer := w // the hub that is started again must outlive this part
		w := w.in(t)
		agent := w.looseAgent("fleet", "halfway", "env=leaving")
		w.has(agent.plane)
		agent.process.kill()
		cut := w.start("deregister", w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=halfway")
		w.eventually("the deregistration is under way", func() error { return w.isLeaving("fleet", "halfway") })
		_ = cut.cmd.Process.Signal(os.Interrupt) // an error means that it has ended, which is judged below
		<-cut.exited
		if code := cut.cmd.ProcessState.ExitCode(); code != 130 {
			t.Errorf("an interrupted deregistration exits with %d, want 130", code)
		}
		outer.hubOS.kill()
		agent.start()
		outer.startHub()
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=halfway")
		w.hasNot(agent.plane)
		w.wantNoAgent(agent.plane)
		w.wantNoTrace("halfway")
	})
	t.Run("gone for good", func(t *testing.T) {
		w := w.in(t)
		out, err := w.tryBoth(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=gone", "--wait=3s", "--force")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out, "left behind") || !strings.Contains(out, "delivered") {
			t.Errorf("deregister --force does not say what it left behind: %q", out)
		}
		w.wantNoTrace("gone")
	})

	w.has(neighbour)
	w.ready("fleet", "neighbour")
	if diff := cmp.Diff(before, w.traces("neighbour")); diff != "" {
		t.Errorf("objects of the neighbour on the hub (-before +after):\n%s", diff)
	}
}

// TestDeregisterPush is the same in push mode.
func TestDeregisterPush(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	w.apply(w.hub, deregisterProfile)
	w.kubectl(w.hub, "create", "namespace", "fleet")
	neighbour := w.pushInto("fleet", "neighbour")
	w.has(neighbour)
	before := w.traces("neighbour")

	t.Run("healthy", func(t *testing.T) {
		w := w.in(t)
		plane := w.pushInto("fleet", "healthy")
		w.has(plane)
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=healthy")
		w.hasNot(plane)
		w.wantNoTrace("healthy")
	})
	t.Run("gone for a while, then for good", func(t *testing.T) {
		w := w.in(t)
		plane := w.pushInto("fleet", "gone")
		w.has(plane)
		if err := plane.Kill(); err != nil {
			t.Fatal(err)
		}
		_, err := w.try(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=gone", "--wait=3s")
		wantError(t, err, "fleet/gone", "waiting for", "--force")
		out, err := w.tryBoth(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=gone", "--wait=3s", "--force")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out, "left behind") {
			t.Errorf("deregister --force does not say what it left behind: %q", out)
		}
		w.wantNoTrace("gone")
	})
	t.Run("hub killed half-way", func(t *testing.T) {
		outer := w // the hub that is started again must outlive this part
		w := w.in(t)
		plane := w.pushInto("fleet", "halfway")
		w.has(plane)
		outer.hubOS.kill()
		_, err := w.try(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=halfway", "--wait=2s")
		wantError(t, err, "fleet/halfway", "hub")
		w.has(plane)
		outer.startHub()
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster=halfway")
		w.hasNot(plane)
		w.wantNoTrace("halfway")
	})

	w.has(neighbour)
	if diff := cmp.Diff(before, w.traces("neighbour")); diff != "" {
		t.Errorf("objects of the neighbour on the hub (-before +after):\n%s", diff)
	}
}

// pushInto starts a member and registers it in push mode in a namespace that exists.
func (w *world) pushInto(namespace, cluster string) *localkube.Plane {
	w.t.Helper()
	plane := w.member(cluster)
	w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+namespace, "--cluster="+cluster, "--kubeconfig="+plane.Kubeconfig, "--labels=env=leaving")
	w.ready(namespace, cluster)
	return plane
}

// has waits until the profile's object is on a member.
func (w *world) has(plane *localkube.Plane) {
	w.t.Helper()
	w.eventually("the profile is on "+plane.Name, func() error {
		_, err := w.data(plane, "default", "delivered")
		return err
	})
}

// hasNot checks that it is not: a deregistration that says that it is done has withdrawn it.
func (w *world) hasNot(plane *localkube.Plane) {
	w.t.Helper()
	if err := w.absent(plane, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		w.t.Error(err)
	}
}

// isLeaving says what is wrong unless the cluster is being deregistered.
func (w *world) isLeaving(namespace, cluster string) error {
	found := &libv1beta1.SveltosCluster{}
	err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: cluster}, found)
	if err == nil && found.DeletionTimestamp == nil {
		err = fmt.Errorf("cluster %s/%s is not being deleted", namespace, cluster)
	}
	return err
}

// traces lists the objects of the hub that name a cluster.
func (w *world) traces(cluster string) []string {
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

// wantNoTrace checks that the hub has nothing of a cluster any more.
func (w *world) wantNoTrace(cluster string) {
	w.t.Helper()
	w.eventually("the hub has nothing of "+cluster, func() error {
		if found := w.traces(cluster); len(found) > 0 {
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
			t.Errorf("error %q does not say %q", err, text)
		}
	}
}

// tryBoth is try with the standard error after the standard output.
func (w *world) tryBoth(plane *localkube.Plane, binary string, args ...string) (string, error) {
	cmd := w.command(plane, binary, args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, out)
	}
	return string(out), nil
}

// in returns the world for a subtest.
func (w *world) in(t *testing.T) *world {
	t.Helper()
	inner := *w
	inner.t = t
	return &inner
}
