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

// TestKarmadaFleet lands one profile on a SveltosCluster and on a Cluster in each mode: four members, which leave it
// one after the other.
func TestKarmadaFleet(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	planes := w.karmadaMembers("sveltos-push", "sveltos-pull", "karmada-push", "karmada-pull")
	w.kubectl(w.hub, "create", "namespace", "fleet")
	w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace=fleet", "--cluster=sveltos-push", "--kubeconfig="+planes[0].Kubeconfig)
	w.apply(planes[1], w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace=fleet", "--cluster=sveltos-pull", "--pullmode"))
	w.joins(planes[2])
	w.registers(planes[3])
	w.ready("fleet", "sveltos-push")
	w.ready("fleet", "sveltos-pull")

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
		w.has(m.plane)
		w.hasSummary(m.namespace, m.plane.Name)
	}
	w.bundlesGone()
	w.wantGroupsIn("fleet", "karmada-es-karmada-pull")
	for _, plane := range planes[2:] {
		t.Run("Works on "+plane.Name, func(t *testing.T) { w.in(t).works(plane) })
	}
	for i, m := range members {
		w.kubectl(w.hub, append(append([]string{"label"}, m.object...), "env-")...)
		w.eventually("the profile leaves "+m.plane.Name, func() error {
			return errors.Join(w.absent(m.plane, &corev1.ConfigMap{}, "delivered", "default"), w.hasNoSummary(m.namespace, m.plane.Name))
		})
		for _, other := range members[i+1:] {
			w.has(other.plane)
		}
	}
	w.wantClusters([]string{"karmada-pull", "v1.36.3", "Pull", "True", "*"}, []string{"karmada-push", "v1.36.3", "Push", "True", "*"})
	for _, plane := range planes[2:] {
		w.sends(plane, "until it is deleted")
		w.kubectl(w.hub, "delete", "cluster", plane.Name, "--timeout=60s")
		if err := w.absent(plane, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
			t.Error(err)
		}
		w.wantLeft(plane)
	}
}

// wantGroupsIn checks that what pull members are to have is kept in those namespaces.
func (w *world) wantGroupsIn(want ...string) {
	w.t.Helper()
	out := w.kubectl(w.hub, "get", "configurationgroups", "-A", "--no-headers", "-o", "custom-columns=NAMESPACE:.metadata.namespace")
	got := slices.Compact(slices.Sorted(strings.FieldsSeq(out)))
	if !slices.Equal(got, want) {
		w.t.Errorf("there are groups in the namespaces %q, want %q", got, want)
	}
}

// hasSummary waits until the one summary of a cluster says that its features are provisioned.
func (w *world) hasSummary(namespace, cluster string) {
	w.t.Helper()
	w.eventually("the summary of "+cluster+" is provisioned", func() error {
		names, err := w.summaries(namespace, cluster)
		if err != nil {
			return err
		}
		if len(names) != 1 {
			return fmt.Errorf("there are summaries %q, want one", names)
		}
		return w.wantStatuses(namespace, names[0], "Provisioned")
	})
}

func (w *world) hasNoSummary(namespace, cluster string) error {
	names, err := w.summaries(namespace, cluster)
	if err == nil && len(names) > 0 {
		err = fmt.Errorf("there are summaries %q", names)
	}
	return err
}

// summaries are the names of the summaries of a cluster.
func (w *world) summaries(namespace, cluster string) ([]string, error) {
	out, err := w.try(w.hub, "kubectl", "get", "clustersummaries", "-n", namespace, "--no-headers", "-o", "custom-columns=NAME:.metadata.name")
	var names []string
	for name := range strings.FieldsSeq(out) {
		if strings.HasSuffix(name, cluster) {
			names = append(names, name)
		}
	}
	return names, err
}
