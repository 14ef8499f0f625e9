package stories

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/localkube"
)

// races is the number of times that one member is registered under two names at once, and sameName the number of times
// that two members are registered under one name. lanes of them run at the same time.
const (
	races    = 100
	sameName = 20
	lanes    = 4
)

// TestKarmadaIdentity checks that a cluster has one name and a name one cluster, also if they register at the same
// time, and that a refused registration changes nothing.
func TestKarmadaIdentity(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	planes := w.karmadaMembers("alpha", "beta")
	alpha, beta := planes[0], planes[1]
	w.registerMember(alpha)
	w.propagateWork(alpha, "before")

	t.Run("the name of another cluster", func(t *testing.T) { w.forSubtest(t).rejectsUsedName(alpha, beta) })
	t.Run("a member under two names", func(t *testing.T) { w.forSubtest(t).rejectsSecondName(alpha) })
	t.Run("created with kubectl", func(t *testing.T) { w.forSubtest(t).ignoresManualCluster(alpha) })
	t.Run("two commands at once", func(t *testing.T) { w.forSubtest(t).raceRegisterCommands(beta) })
	t.Run(fmt.Sprintf("two requests at once, %d times", races), func(t *testing.T) { w.forSubtest(t).raceRequests() })

	w.propagateWork(alpha, "after")
	w.awaitClusterReady("alpha", "Pull")
}

// rejectsUsedName registers and joins a member under the name of another cluster. That cluster keeps working.
func (w *world) rejectsUsedName(alpha, beta *localkube.Plane) {
	w.t.Helper()
	hub, member := w.awaitStable(w.hub), w.awaitStable(beta)
	id := w.kubectl(beta, "get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}")
	taken := fmt.Sprintf("the cluster ID %s or the cluster name alpha has been registered", id)
	_, err := output(w.shellCommand(beta, w.createTokenCommand("--ttl=10m")+" --cluster-name=alpha"))
	wantExit(w.t, err, 1, "alpha", "registered")
	_, err = output(w.shellCommand(beta, fmt.Sprintf("karmadactl join alpha --kubeconfig=%s --cluster-kubeconfig=%s", w.hub.Kubeconfig, beta.Kubeconfig)))
	wantExit(w.t, err, 1, taken)
	w.wantUnchanged("registering under a name that is taken", w.hub, hub)
	w.wantUnchanged("registering under a name that is taken", beta, member)
	w.propagateWork(alpha, "still working")
	w.awaitClusterReady("alpha", "Pull")
}

// rejectsSecondName registers and joins a member that is registered under another name.
func (w *world) rejectsSecondName(alpha *localkube.Plane) {
	w.t.Helper()
	w.awaitStable(alpha)
	hub, member := w.awaitStable(w.hub), w.awaitStable(alpha)
	taken := fmt.Sprintf("the cluster ID %s or the cluster name other has been registered", w.kubectl(alpha, "get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}"))
	_, err := output(w.shellCommand(alpha, w.createTokenCommand("--ttl=10m")+" --cluster-name=other --namespace=other"))
	wantExit(w.t, err, 1, "registered")
	_, err = output(w.shellCommand(alpha, fmt.Sprintf("karmadactl join other --kubeconfig=%s --cluster-kubeconfig=%s", w.hub.Kubeconfig, alpha.Kubeconfig)))
	wantExit(w.t, err, 1, taken)
	w.wantUnchanged("a second name", w.hub, hub)
	w.wantUnchanged("a second name", alpha, member)
}

// ignoresManualCluster creates a Cluster with the id of another one. The hub does nothing with it, and it can be
// deleted.
func (w *world) ignoresManualCluster(alpha *localkube.Plane) {
	w.t.Helper()
	hub := w.awaitStable(w.hub)
	id := w.kubectl(w.hub, "get", "cluster", alpha.Name, "-o", "jsonpath={.spec.id}")
	w.apply(w.hub, fmt.Sprintf(`
apiVersion: cluster.karmada.io/v1alpha1
kind: Cluster
metadata: {name: copy}
spec: {syncMode: Push, id: %s, apiEndpoint: %q, insecureSkipTLSVerification: true}
`, id, alpha.Config.Host))
	w.eventually("the copy is refused", func() error {
		out, err := w.try(w.hub, "kubectl", "get", "cluster", "copy", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}: {.status.conditions[?(@.type=="Ready")].message}`)
		if want := fmt.Sprintf("False: the cluster ID %s or the cluster name copy has been registered", id); err == nil && out != want {
			err = fmt.Errorf("Ready is %q, want %q", out, want)
		}
		return err
	})
	w.kubectl(w.hub, "delete", "cluster", "copy", "--timeout=30s")
	w.wantUnchanged("a copy that came and went", w.hub, hub)
}

// raceRegisterCommands runs two commands at once that register the same member under two names. One of them succeeds,
// and the other one leaves no object.
func (w *world) raceRegisterCommands(plane *localkube.Plane) {
	w.t.Helper()
	joins := func(name string) string {
		return fmt.Sprintf("karmadactl join %s --kubeconfig=%s --cluster-kubeconfig=%s", name, w.hub.Kubeconfig, plane.Kubeconfig)
	}
	registers := func(name string) string {
		return w.createTokenCommand() + " --cluster-name=" + name + " --namespace=karmada-" + name
	}
	for round, lines := range []map[string]string{
		{"one": joins("one"), "two": joins("two")},
		{"one": joins("one"), "two": registers("two")},
		{"one": registers("one"), "two": registers("two")},
	} {
		var both sync.WaitGroup
		failures := map[string]*error{"one": new(error), "two": new(error)}
		for name, line := range lines {
			cmd := w.shellCommand(plane, line)
			both.Go(func() { *failures[name] = runCommand(cmd) })
		}
		both.Wait()
		winner, loser := "one", "two"
		if *failures["one"] != nil {
			winner, loser = loser, winner
		}
		if *failures[winner] != nil {
			w.t.Fatalf("round %d: both commands failed: %v and %v", round, *failures["one"], *failures["two"])
		}
		wantExit(w.t, *failures[loser], 1, "registered")
		w.wantNoCluster(loser)
		w.awaitClusterStatus(winner, "True")
		w.kubectl(w.hub, "delete", "cluster", winner, "--timeout=60s")
		w.wantNoCluster(winner)
		w.wantCleanMember(plane)
	}
}

func runCommand(cmd *exec.Cmd) error {
	_, err := output(cmd)
	return err
}

// raceRequests creates two requests at once, several times: with one id and two names, and with one name and two ids.
// The hub approves exactly one of the two, and denies the other one with the reason.
func (w *world) raceRequests() {
	w.t.Helper()
	var all sync.WaitGroup
	failures := make([]error, races+sameName)
	gate := make(chan struct{}, lanes)
	for round := range failures {
		all.Go(func() {
			gate <- struct{}{}
			defer func() { <-gate }()
			failures[round] = w.raceOnce(round)
		})
	}
	all.Wait()
	if err := errors.Join(failures...); err != nil {
		w.t.Error(err)
	}
	// The winners are deleted; the losers have no objects.
	w.kubectl(w.hub, "delete", "clusters", "-l", racePrefix+"=true", "--timeout=120s")
	w.eventually("no object of the races is left", func() error {
		for key := range w.dump(w.hub) {
			if strings.Contains(key, racePrefix) {
				return errors.New("object still exists: " + key)
			}
		}
		return nil
	})
}

// racePrefix is the prefix of the names in raceRequests.
const racePrefix = "raced"

// competitor is one of two requests for the same name or id.
type competitor struct {
	name, id string
	decision decision
	err      error
}

// raceOnce creates two requests at once.
func (w *world) raceOnce(round int) error {
	one := competitor{name: fmt.Sprintf("%s-%d-a", racePrefix, round), id: string(uuid.NewUUID())}
	two := competitor{name: fmt.Sprintf("%s-%d-b", racePrefix, round), id: one.id}
	if round >= races {
		two = competitor{name: one.name, id: string(uuid.NewUUID())}
	}
	contenders := []*competitor{&one, &two}
	var pair sync.WaitGroup
	for _, c := range contenders {
		token, err := w.createToken()
		if err != nil {
			return err
		}
		config := w.tokenConfig(token.String())
		pair.Go(func() {
			var name string
			if name, c.err = w.createRequest(config, validRequest(c.name, c.id)); c.err == nil {
				c.decision, c.err = w.awaitDecision(name)
			}
		})
	}
	pair.Wait()
	what := fmt.Sprintf("round %d: %s as %s and %s as %s", round, one.id, one.name, two.id, two.name)
	if one.err != nil || two.err != nil {
		return fmt.Errorf("%s: %w and %w", what, one.err, two.err)
	}
	if one.decision.approved == two.decision.approved {
		return fmt.Errorf("%s: want one of them approved, got %+v and %+v", what, one.decision, two.decision)
	}
	winner, loser := one, two
	if two.decision.approved {
		winner, loser = two, one
	}
	if want := fmt.Sprintf("the cluster ID %s or the cluster name %s has been registered", loser.id, loser.name); !strings.Contains(loser.decision.message, want) {
		return fmt.Errorf("%s: the message of the loser is %q, want %q", what, loser.decision.message, want)
	}
	if err := w.wantWinner(winner, loser); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// wantWinner checks that the hub has the Cluster of the winner and not of the loser, and labels the former.
func (w *world) wantWinner(winner, loser competitor) error {
	hub := w.client(w.hub)
	clusters := &clusterv1alpha1.ClusterList{}
	if err := hub.List(w.t.Context(), clusters); err != nil {
		return err
	}
	var found []string
	for _, c := range clusters.Items {
		if c.Name == winner.name || c.Name == loser.name || c.Spec.ID == winner.id || c.Spec.ID == loser.id {
			found = append(found, c.Name+" is "+c.Spec.ID)
		}
	}
	if want := winner.name + " is " + winner.id; len(found) != 1 || found[0] != want {
		return fmt.Errorf("the hub has %q, want only %q", found, want)
	}
	mark := fmt.Appendf(nil, `{"metadata":{"labels":{%q:"true"}}}`, racePrefix)
	cluster := &clusterv1alpha1.Cluster{}
	cluster.Name = winner.name
	return hub.Patch(w.t.Context(), cluster, client.RawPatch(types.MergePatchType, mark))
}
