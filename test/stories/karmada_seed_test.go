package stories

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/towline/towline/internal/localkube"
)

// TestSeed004Push joins a cluster and unjoins it, with the commands of the seed.
func TestSeed004Push(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	planes := w.karmadaMembers("member1", "member2")
	seed := strings.NewReplacer(
		"<karmada kubeconfig>", w.hub.Kubeconfig, "<karmada context>", w.hub.Name,
		"<member1 kubeconfig>", planes[0].Kubeconfig, "<member2 kubeconfig>", planes[1].Kubeconfig)

	printed := w.runShell(planes[0], seed.Replace("karmadactl join member1 --kubeconfig=<karmada kubeconfig> --cluster-kubeconfig=<member1 kubeconfig>"))
	if want := "cluster(member1) is joined successfully\n"; printed != want {
		t.Errorf("join printed %q, want %q", printed, want)
	}
	// The name may differ from the context's.
	w.runShell(planes[0], seed.Replace(`karmadactl join second --kubeconfig=<karmada kubeconfig> --karmada-context=<karmada context> \
--cluster-kubeconfig=<member2 kubeconfig> --cluster-context=member2`))
	w.awaitClusterReady("member1", "Push")
	w.awaitClusterReady("second", "Push")
	w.wantClusters([]string{"member1", "v1.36.3", "Push", "True", "*"}, []string{"second", "v1.36.3", "Push", "True", "*"})
	w.wantClusterID("member1", planes[0])

	w.propagateWork(planes[0], "hello")
	w.eventually("the Work reports its result", func() error {
		return wantFields(w.tableRow(w.kubectl(w.hub, "get", "works", "-n", "karmada-es-member1"), "delivered"), "delivered", "ConfigMap", "True", "*")
	})
	w.runShell(planes[0], seed.Replace("karmadactl unjoin member1 --kubeconfig=<karmada kubeconfig> --cluster-kubeconfig=<member1 kubeconfig>"))
	if err := w.wantMissing(planes[0], &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		t.Error(err)
	}
	w.wantRemoved(planes[0])
	w.wantClusters([]string{"second", "v1.36.3", "Push", "True", "*"})

	// With the plugin, and without the cluster's kubeconfig, which is not needed; the deployed objects may stay.
	w.apply(w.hub, strings.Replace(fmt.Sprintf(karmadaWork, "second", "stays"), "name: delivered\n", "name: staying\n", 1))
	w.awaitDeployed(planes[1])
	w.runShell(w.hub, "kubectl karmada unjoin second --orphan")
	w.awaitDeployed(planes[1])
	w.wantNoCluster("second")
}

// wantClusters checks the table of clusters.
func (w *world) wantClusters(want ...[]string) {
	w.t.Helper()
	lines := strings.Split(strings.TrimSpace(w.runShell(w.hub, "kubectl get clusters")), "\n")
	want = append([][]string{{"NAME", "VERSION", "MODE", "READY", "AGE"}}, want...)
	if len(lines) != len(want) {
		w.t.Errorf("kubectl get clusters printed %q, want %d lines", lines, len(want))
		return
	}
	for i, fields := range want {
		if err := wantFields(lines[i], fields...); err != nil {
			w.t.Error(err)
		}
	}
}

// wantClusterID checks that the id of a Cluster is the uid of its namespace kube-system.
func (w *world) wantClusterID(name string, plane *localkube.Plane) {
	w.t.Helper()
	id := w.kubectl(w.hub, "get", "cluster", name, "-o", "jsonpath={.spec.id}")
	if uid := w.kubectl(plane, "get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}"); id != uid {
		w.t.Errorf("spec.id of %s is %q, want the uid of its kube-system, %q", name, id, uid)
	}
}

// registerOutput is the output of register.
const registerOutput = `[preflight] Running pre-flight checks
[preflight] All pre-flight checks were passed
[karmada-agent-start] Waiting to perform the TLS Bootstrap
[karmada-agent-start] Waiting to check cluster exists
[karmada-agent-start] Assign the necessary RBAC permissions to the agent
[karmada-agent-start] Waiting to construct karmada-agent kubeconfig
[karmada-agent-start] Waiting the necessary secret and RBAC
[karmada-agent-start] Waiting karmada-agent Deployment

cluster(%s) is joined successfully
`

// TestSeed004Pull registers a cluster and unregisters it, with the commands of the seed. The register command is the
// one that token create prints.
func TestSeed004Pull(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	member3 := w.karmadaMembers("member3")[0]
	seed := strings.NewReplacer(
		"/etc/karmada/karmada-apiserver.config", w.hub.Kubeconfig, "<karmada kubeconfig>", w.hub.Kubeconfig, "<karmada context>", w.hub.Name,
		"<member3 kubeconfig>", member3.Kubeconfig, "<member3 context>", "member3")

	line := w.runShell(w.hub, seed.Replace("karmadactl token create --print-register-command --kubeconfig /etc/karmada/karmada-apiserver.config"))
	pattern := `^karmadactl register ` + regexp.QuoteMeta(w.hubHost()) + ` --token [a-z0-9]{6}\.[a-z0-9]{16} --discovery-token-ca-cert-hash sha256:[0-9a-f]{64}\n$`
	if !regexp.MustCompile(pattern).MatchString(line) {
		t.Fatalf("token create printed %q, want %s", line, pattern)
	}
	if plugin := w.runShell(w.hub, "kubectl karmada token create --print-register-command"); !strings.HasPrefix(plugin, "kubectl karmada register ") {
		t.Errorf("the plugin printed %q", plugin)
	}
	w.wantTokens(line)
	if diff := cmp.Diff(fmt.Sprintf(registerOutput, "member3"), w.runShell(member3, line)); diff != "" {
		t.Errorf("register printed (-want +got):\n%s", diff)
	}
	w.wantClusters([]string{"member3", "v1.36.3", "Pull", "True", "*"})
	w.wantClusterID("member3", member3)
	if pods := w.kubectl(member3, "get", "pods", "-n", agentSpace, "-l", "app=karmada-agent", "-o", "name"); len(strings.Fields(pods)) != 1 {
		t.Errorf("pods of the agent's Deployment: got %q, want one", pods)
	}

	w.propagateWork(member3, "hello")
	w.runShell(w.hub, seed.Replace("karmadactl unregister member3 --cluster-kubeconfig=<member3 kubeconfig> --cluster-context=<member3 context> "+
		"--karmada-config=<karmada kubeconfig> --karmada-context=<karmada context>"))
	if err := w.wantMissing(member3, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		t.Error(err)
	}
	w.wantRemoved(member3)

	// Register again, and unregister with the agent's kubeconfig for the hub; and then with the deployed objects left
	// there.
	w.registerMember(member3)
	w.propagateWork(member3, "again")
	w.runShell(member3, seed.Replace("karmadactl unregister member3 --cluster-kubeconfig=<member3 kubeconfig>"))
	if err := w.wantMissing(member3, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		t.Error(err)
	}
	w.wantRemoved(member3)
	w.registerMember(member3)
	w.propagateWork(member3, "stays")
	w.runShell(member3, seed.Replace("karmadactl unregister member3 --cluster-kubeconfig=<member3 kubeconfig> --karmada-config=<karmada kubeconfig> --orphan"))
	w.awaitDeployed(member3)
	w.kubectl(member3, "delete", "configmap", "delivered")
	w.wantRemoved(member3)
}

// wantTokens checks the list of tokens, and deletes one by its id.
func (w *world) wantTokens(line string) {
	w.t.Helper()
	token := regexp.MustCompile(`[a-z0-9]{6}\.[a-z0-9]{16}`).FindString(line)
	list := w.runShell(w.hub, "karmadactl token list")
	if heading, _, _ := strings.Cut(list, "\n"); strings.Join(strings.Fields(heading), " ") != "TOKEN TTL EXPIRES USAGES DESCRIPTION EXTRA GROUPS" {
		w.t.Errorf("token list begins with %q", heading)
	}
	want := []string{token, "23h", "*", "authentication,signing", "<none>", "system:bootstrappers:karmada:default-cluster-token"}
	if got := w.tableRow(list, token); wantFields(strings.Replace(got, "signing,authentication", "authentication,signing", 1), want...) != nil {
		w.t.Errorf("token list printed %q, want %q", got, want)
	}
	other := strings.TrimSpace(w.runShell(w.hub, "karmadactl token create --ttl=0"))
	id, _, _ := strings.Cut(other, ".")
	if got, want := w.runShell(w.hub, "karmadactl token delete "+id), fmt.Sprintf("bootstrap token %q deleted\n", id); got != want {
		w.t.Errorf("token delete printed %q, want %q", got, want)
	}
	if list := w.runShell(w.hub, "karmadactl token list"); strings.Contains(list, other) {
		w.t.Errorf("a token that was deleted is in the list:\n%s", list)
	}
}
