package stories

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/towline/towline/internal/localkube"
)

// TestKarmadaFleet deploys one profile to a SveltosCluster and a Cluster in each mode: four members, which are
// deregistered one after the other.
func TestKarmadaFleet(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	planes := w.karmadaMembers("sveltos-push", "sveltos-pull", "karmada-push", "karmada-pull")
	w.kubectl(w.hub, "create", "namespace", "fleet")
	w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace=fleet", "--cluster=sveltos-push", "--kubeconfig="+planes[0].Kubeconfig)
	w.apply(planes[1], w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace=fleet", "--cluster=sveltos-pull", "--pullmode"))
	w.joinMember(planes[2])
	w.registerMember(planes[3])
	w.awaitReady("fleet", "sveltos-push")
	w.awaitReady("fleet", "sveltos-pull")

	members := []struct {
		plane     *localkube.Plane
		namespace string
		object    []string
	}{
		{planes[0], "fleet", []string{"sveltoscluster", "sveltos-push", "-n", "fleet"}},
		{planes[1], "fleet", []string{"sveltoscluster", "sveltos-pull", "-n", "fleet"}},
		{planes[2], "karmada-es-karmada-push", []string{"cluster", "karmada-push"}},
		{planes[3], "karmada-es-karmada-pull", []string{"cluster", "karmada-pull"}},
	}
	w.apply(w.hub, deregisterProfile)
	for _, m := range members {
		w.kubectl(w.hub, append(append([]string{"label"}, m.object...), "env=leaving")...)
	}
	for _, m := range members {
		w.awaitDeployed(m.plane)
		w.awaitSummary(m.namespace, m.plane.Name)
	}
	w.awaitNoBundles()
	w.wantGroupsIn("fleet", "karmada-es-karmada-pull")
	for _, plane := range planes[2:] {
		t.Run("Works on "+plane.Name, func(t *testing.T) { w.forSubtest(t).checkWorks(plane) })
	}
	for i, m := range members {
		w.kubectl(w.hub, append(append([]string{"label"}, m.object...), "env-")...)
		w.eventually("the profile is withdrawn from "+m.plane.Name, func() error {
			return errors.Join(w.wantMissing(m.plane, &corev1.ConfigMap{}, "delivered", "default"), w.wantNoSummary(m.namespace, m.plane.Name))
		})
		for _, other := range members[i+1:] {
			w.awaitDeployed(other.plane)
		}
	}
	w.wantClusters([]string{"karmada-pull", "v1.36.3", "Pull", "True", "*"}, []string{"karmada-push", "v1.36.3", "Push", "True", "*"})
	for _, plane := range planes[2:] {
		w.propagateWork(plane, "until it is deleted")
		w.kubectl(w.hub, "delete", "cluster", plane.Name, "--timeout=60s")
		if err := w.wantMissing(plane, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
			t.Error(err)
		}
		w.wantRemoved(plane)
	}
}

// wantGroupsIn checks that these namespaces, and no others, have groups.
func (w *world) wantGroupsIn(want ...string) {
	w.t.Helper()
	out := w.kubectl(w.hub, "get", "configurationgroups", "-A", "--no-headers", "-o", "custom-columns=NAMESPACE:.metadata.namespace")
	got := slices.Compact(slices.Sorted(strings.FieldsSeq(out)))
	if !slices.Equal(got, want) {
		w.t.Errorf("namespaces with groups: got %q, want %q", got, want)
	}
}

// awaitSummary waits until the only summary of a cluster reports its features as provisioned.
func (w *world) awaitSummary(namespace, cluster string) {
	w.t.Helper()
	w.eventually("the summary of "+cluster+" is provisioned", func() error {
		names, err := w.listSummaries(namespace, cluster)
		if err != nil {
			return err
		}
		if len(names) != 1 {
			return fmt.Errorf("got summaries %q, want one", names)
		}
		return w.wantStatuses(namespace, names[0], "Provisioned")
	})
}

func (w *world) wantNoSummary(namespace, cluster string) error {
	names, err := w.listSummaries(namespace, cluster)
	if err == nil && len(names) > 0 {
		err = fmt.Errorf("got summaries %q, want none", names)
	}
	return err
}

// listSummaries returns the names of the summaries of a cluster.
func (w *world) listSummaries(namespace, cluster string) ([]string, error) {
	out, err := w.try(w.hub, "kubectl", "get", "clustersummaries", "-n", namespace, "--no-headers", "-o", "custom-columns=NAME:.metadata.name")
	var names []string
	for name := range strings.FieldsSeq(out) {
		if strings.HasSuffix(name, cluster) {
			names = append(names, name)
		}
	}
	return names, err
}
