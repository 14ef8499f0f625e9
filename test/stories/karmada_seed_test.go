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

// TestSeed004Push brings a cluster in by push and takes it out again, typed as the seed prints it.
func TestSeed004Push(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	planes := w.karmadaMembers("member1", "member2")
	seed := strings.NewReplacer(
		"<karmada kubeconfig>", w.hub.Kubeconfig, "<karmada context>", w.hub.Name,
		"<member1 kubeconfig>", planes[0].Kubeconfig, "<member2 kubeconfig>", planes[1].Kubeconfig)

	printed := w.typed(planes[0], seed.Replace("karmadactl join member1 --kubeconfig=<karmada kubeconfig> --cluster-kubeconfig=<member1 kubeconfig>"))
	if want := "cluster(member1) is joined successfully\n"; printed != want {
		t.Errorf("join printed %q, want %q", printed, want)
	}
	// The name may be another than the context's.
	w.typed(planes[0], seed.Replace(`karmadactl join second --kubeconfig=<karmada kubeconfig> --karmada-context=<karmada context> \
--cluster-kubeconfig=<member2 kubeconfig> --cluster-context=member2`))
	w.clusterReady("member1", "Push")
	w.clusterReady("second", "Push")
	w.wantClusters([]string{"member1", "v1.36.3", "Push", "True", "*"}, []string{"second", "v1.36.3", "Push", "True", "*"})
	w.identified("member1", planes[0])

	w.sends(planes[0], "hello")
	w.eventually("the Work says what became of it", func() error {
		return wantFields(w.row(w.kubectl(w.hub, "get", "works", "-n", "karmada-es-member1"), "delivered"), "delivered", "ConfigMap", "True", "*")
	})
	w.typed(planes[0], seed.Replace("karmadactl unjoin member1 --kubeconfig=<karmada kubeconfig> --cluster-kubeconfig=<member1 kubeconfig>"))
	if err := w.absent(planes[0], &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		t.Error(err)
	}
	w.wantLeft(planes[0])
	w.wantClusters([]string{"second", "v1.36.3", "Push", "True", "*"})

	// With the plugin, and without the cluster's kubeconfig, which is not needed; what is deployed may stay.
	w.apply(w.hub, strings.Replace(fmt.Sprintf(karmadaWork, "second", "stays"), "name: delivered\n", "name: staying\n", 1))
	w.has(planes[1])
	w.typed(w.hub, "kubectl karmada unjoin second --orphan")
	w.has(planes[1])
	w.wantNoCluster("second")
}

// wantClusters checks the table of clusters.
func (w *world) wantClusters(want ...[]string) {
	w.t.Helper()
	lines := strings.Split(strings.TrimSpace(w.typed(w.hub, "kubectl get clusters")), "\n")
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

// identified checks that a Cluster is known by the uid of its namespace kube-system.
func (w *world) identified(name string, plane *localkube.Plane) {
	w.t.Helper()
	id := w.kubectl(w.hub, "get", "cluster", name, "-o", "jsonpath={.spec.id}")
	if uid := w.kubectl(plane, "get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}"); id != uid {
		w.t.Errorf("spec.id of %s is %q, want the uid of its kube-system, %q", name, id, uid)
	}
}

// registerOutput is what register prints.
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

// TestSeed004Pull brings a cluster in by pull and takes it out again, typed as the seed prints it; the register command
// is pasted as it is printed.
func TestSeed004Pull(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	member3 := w.karmadaMembers("member3")[0]
	seed := strings.NewReplacer(
		"/etc/karmada/karmada-apiserver.config", w.hub.Kubeconfig, "<karmada kubeconfig>", w.hub.Kubeconfig, "<karmada context>", w.hub.Name,
		"<member3 kubeconfig>", member3.Kubeconfig, "<member3 context>", "member3")

	line := w.typed(w.hub, seed.Replace("karmadactl token create --print-register-command --kubeconfig /etc/karmada/karmada-apiserver.config"))
	pattern := `^karmadactl register ` + regexp.QuoteMeta(w.hubHost()) + ` --token [a-z0-9]{6}\.[a-z0-9]{16} --discovery-token-ca-cert-hash sha256:[0-9a-f]{64}\n$`
	if !regexp.MustCompile(pattern).MatchString(line) {
		t.Fatalf("token create printed %q, want %s", line, pattern)
	}
	if plugin := w.typed(w.hub, "kubectl karmada token create --print-register-command"); !strings.HasPrefix(plugin, "kubectl karmada register ") {
		t.Errorf("the plugin printed %q", plugin)
	}
	w.wantTokens(line)
	if diff := cmp.Diff(fmt.Sprintf(registerOutput, "member3"), w.typed(member3, line)); diff != "" {
		t.Errorf("register printed (-want +got):\n%s", diff)
	}
	w.wantClusters([]string{"member3", "v1.36.3", "Pull", "True", "*"})
	w.identified("member3", member3)
	if pods := w.kubectl(member3, "get", "pods", "-n", agentSpace, "-l", "app=karmada-agent", "-o", "name"); len(strings.Fields(pods)) != 1 {
		t.Errorf("pods of the agent's Deployment: got %q, want one", pods)
	}

	w.sends(member3, "hello")
	w.typed(w.hub, seed.Replace("karmadactl unregister member3 --cluster-kubeconfig=<member3 kubeconfig> --cluster-context=<member3 context> "+
		"--karmada-config=<karmada kubeconfig> --karmada-context=<karmada context>"))
	if err := w.absent(member3, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		t.Error(err)
	}
	w.wantLeft(member3)

	// Once more, and out of it with the agent's own way to the hub; and then with what is deployed left there.
	w.registers(member3)
	w.sends(member3, "again")
	w.typed(member3, seed.Replace("karmadactl unregister member3 --cluster-kubeconfig=<member3 kubeconfig>"))
	if err := w.absent(member3, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		t.Error(err)
	}
	w.wantLeft(member3)
	w.registers(member3)
	w.sends(member3, "stays")
	w.typed(member3, seed.Replace("karmadactl unregister member3 --cluster-kubeconfig=<member3 kubeconfig> --karmada-config=<karmada kubeconfig> --orphan"))
	w.has(member3)
	w.kubectl(member3, "delete", "configmap", "delivered")
	w.wantLeft(member3)
}

// wantTokens checks the list of tokens, and that one can be deleted by its id.
func (w *world) wantTokens(line string) {
	w.t.Helper()
	token := regexp.MustCompile(`[a-z0-9]{6}\.[a-z0-9]{16}`).FindString(line)
	list := w.typed(w.hub, "karmadactl token list")
	if heading, _, _ := strings.Cut(list, "\n"); strings.Join(strings.Fields(heading), " ") != "TOKEN TTL EXPIRES USAGES DESCRIPTION EXTRA GROUPS" {
		w.t.Errorf("token list begins with %q", heading)
	}
	want := []string{token, "23h", "*", "authentication,signing", "<none>", "system:bootstrappers:karmada:default-cluster-token"}
	if got := w.row(list, token); wantFields(strings.Replace(got, "signing,authentication", "authentication,signing", 1), want...) != nil {
		w.t.Errorf("token list says %q, want %q", got, want)
	}
	other := strings.TrimSpace(w.typed(w.hub, "karmadactl token create --ttl=0"))
	id, _, _ := strings.Cut(other, ".")
	if got, want := w.typed(w.hub, "karmadactl token delete "+id), fmt.Sprintf("bootstrap token %q deleted\n", id); got != want {
		w.t.Errorf("token delete printed %q, want %q", got, want)
	}
	if list := w.typed(w.hub, "karmadactl token list"); strings.Contains(list, other) {
		w.t.Errorf("a token that was deleted is in the list:\n%s", list)
	}
}
