package stories

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// appliedManifest is the output of `kubectl apply` for a registration, except for the last line, which names the
// cluster.
const appliedManifest = `namespace/projectsveltos created
serviceaccount/sveltos-applier-manager created
clusterrole.rbac.authorization.k8s.io/sveltos-applier-manager-role created
clusterrolebinding.rbac.authorization.k8s.io/sveltos-applier-manager-rolebinding created
service/sveltos-applier-metrics-service created
deployment.apps/sveltos-applier-manager created
`

// TestSeed000RegisterInPullMode registers a cluster in pull mode with the commands of the original documentation.
func TestSeed000RegisterInPullMode(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	member := w.member("prod-cluster")

	manifest := w.run(w.hub, "sveltosctl", "register", "cluster",
		"--namespace=monitoring",
		"--cluster=prod-cluster",
		"--pullmode",
		"--labels=environment=production,tier=backend")
	file := w.save("sveltoscluster_registration.yaml", manifest)

	table := w.kubectl(w.hub, "get", "sveltoscluster", "-n", "monitoring")
	if err := wantFields(strings.SplitN(table, "\n", 2)[0], "NAME", "READY", "VERSION", "AGE"); err != nil {
		t.Error(err)
	}
	if err := wantFields(w.tableRow(table, "prod-cluster"), "prod-cluster", "*"); err != nil {
		t.Errorf("READY and VERSION must be empty before the agent connects: %v", err)
	}
	labels := w.kubectl(w.hub, "get", "sveltoscluster", "prod-cluster", "-n", "monitoring", "-o", "jsonpath={.metadata.labels}")
	if diff := cmp.Diff(`{"environment":"production","tier":"backend"}`, labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}

	got := w.kubectl(member, "apply", "-f", file)
	if diff := cmp.Diff(appliedManifest+"secret/prod-cluster-sveltos-kubeconfig created\n", got); diff != "" {
		t.Errorf("kubectl apply (-want +got):\n%s", diff)
	}

	w.eventually("prod-cluster is ready", func() error {
		table := w.kubectl(w.hub, "get", "sveltoscluster", "-n", "monitoring")
		return wantFields(w.tableRow(table, "prod-cluster"), "prod-cluster", "true", "v1.36.3", "*")
	})
	w.eventually("the agent's pod runs", func() error {
		return wantFields(rowWithPrefix(w.kubectl(member, "get", "pods", "-n", "projectsveltos"), "sveltos-applier-manager-"), "*", "1/1", "Running", "0", "*")
	})
	if err := os.Remove(file); err != nil {
		t.Error(err)
	}
}

// rowWithPrefix returns the first line that starts with prefix.
func rowWithPrefix(table, prefix string) string {
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, prefix) {
			return strings.TrimRight(line, "\n")
		}
	}
	return ""
}
