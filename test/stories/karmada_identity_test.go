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

// races is how many times the same member is registered under two names at once, and sameName how many times two
// members are under one name; lanes is how many such races run at the same time.
const (
	races    = 100
	sameName = 20
	lanes    = 4
)

// TestKarmadaIdentity shows that a cluster has one name and a name one cluster, whoever comes at the same time; and
// that who is refused harms nobody.
func TestKarmadaIdentity(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	planes := w.karmadaMembers("alpha", "beta")
	alpha, beta := planes[0], planes[1]
	w.registers(alpha)
	w.sends(alpha, "before")

	t.Run("a live cluster's name", func(t *testing.T) { w.in(t).liveName(alpha, beta) })
	t.Run("a member under two names", func(t *testing.T) { w.in(t).twoNames(alpha) })
	t.Run("made with kubectl", func(t *testing.T) { w.in(t).madeWithKubectl(alpha) })
	t.Run("raced by hand", func(t *testing.T) { w.in(t).racedByHand(beta) })
	t.Run(fmt.Sprintf("raced %d times", races), func(t *testing.T) { w.in(t).races() })

	w.sends(alpha, "after")
	w.clusterReady("alpha", "Pull")
}

// liveName registers and joins another member under a name that is taken. The cluster that has it keeps working.
func (w *world) liveName(alpha, beta *localkube.Plane) {
	w.t.Helper()
	hub, member := w.settled(w.hub), w.settled(beta)
	id := w.kubectl(beta, "get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}")
	taken := fmt.Sprintf("the cluster ID %s or the cluster name alpha has been registered", id)
	_, err := output(w.types(beta, w.token("--ttl=10m")+" --cluster-name=alpha"))
	exits(w.t, err, 1, "alpha", "registered")
	_, err = output(w.types(beta, fmt.Sprintf("karmadactl join alpha --kubeconfig=%s --cluster-kubeconfig=%s", w.hub.Kubeconfig, beta.Kubeconfig)))
	exits(w.t, err, 1, taken)
	w.wantUnchanged("registering under a name that is taken", w.hub, hub)
	w.wantUnchanged("registering under a name that is taken", beta, member)
	w.sends(alpha, "still working")
	w.clusterReady("alpha", "Pull")
}

// twoNames registers and joins a member that is registered under another name.
func (w *world) twoNames(alpha *localkube.Plane) {
	w.t.Helper()
	w.settled(alpha)
	hub, member := w.settled(w.hub), w.settled(alpha)
	taken := fmt.Sprintf("the cluster ID %s or the cluster name other has been registered", w.kubectl(alpha, "get", "namespace", "kube-system", "-o", "jsonpath={.metadata.uid}"))
	_, err := output(w.types(alpha, w.token("--ttl=10m")+" --cluster-name=other --namespace=other"))
	exits(w.t, err, 1, "registered")
	_, err = output(w.types(alpha, fmt.Sprintf("karmadactl join other --kubeconfig=%s --cluster-kubeconfig=%s", w.hub.Kubeconfig, alpha.Kubeconfig)))
	exits(w.t, err, 1, taken)
	w.wantUnchanged("a second name", w.hub, hub)
	w.wantUnchanged("a second name", alpha, member)
}

// madeWithKubectl makes a Cluster by hand whose id is another's. Nothing is done to it, and it can be deleted.
func (w *world) madeWithKubectl(alpha *localkube.Plane) {
	w.t.Helper()
	hub := w.settled(w.hub)
	id := w.kubectl(w.hub, "get", "cluster", alpha.Name, "-o", "jsonpath={.spec.id}")
	w.apply(w.hub, fmt.Sprintf(`
apiVersion: cluster.karmada.io/v1alpha1
kind: Cluster
metadata: {name: copy}
spec: {syncMode: Push, id: %s, apiEndpoint: %q, insecureSkipTLSVerification: true}
`, id, alpha.Config.Host))
	w.eventually("the copy is told that it is one", func() error {
		out, err := w.try(w.hub, "kubectl", "get", "cluster", "copy", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}: {.status.conditions[?(@.type=="Ready")].message}`)
		if want := fmt.Sprintf("False: the cluster ID %s or the cluster name copy has been registered", id); err == nil && out != want {
			err = fmt.Errorf("Ready is %q, want %q", out, want)
		}
		return err
	})
	w.kubectl(w.hub, "delete", "cluster", "copy", "--timeout=30s")
	w.wantUnchanged("a copy that came and went", w.hub, hub)
}

// racedByHand runs two commands at once that bring the same member in under two names. One of them wins, and the other
// leaves nothing.
func (w *world) racedByHand(plane *localkube.Plane) {
	w.t.Helper()
	joins := func(name string) string {
		return fmt.Sprintf("karmadactl join %s --kubeconfig=%s --cluster-kubeconfig=%s", name, w.hub.Kubeconfig, plane.Kubeconfig)
	}
	registers := func(name string) string {
		return w.token() + " --cluster-name=" + name + " --namespace=karmada-" + name
	}
	for round, lines := range []map[string]string{
		{"one": joins("one"), "two": joins("two")},
		{"one": joins("one"), "two": registers("two")},
		{"one": registers("one"), "two": registers("two")},
	} {
		var both sync.WaitGroup
		failures := map[string]*error{"one": new(error), "two": new(error)}
		for name, line := range lines {
			cmd := w.types(plane, line)
			both.Go(func() { *failures[name] = runs(cmd) })
		}
		both.Wait()
		winner, loser := "one", "two"
		if *failures["one"] != nil {
			winner, loser = loser, winner
		}
		if *failures[winner] != nil {
			w.t.Fatalf("round %d: nobody won: %v and %v", round, *failures["one"], *failures["two"])
		}
		exits(w.t, *failures[loser], 1, "registered")
		w.wantNoCluster(loser)
		w.clusterBecomes(winner, "True")
		w.kubectl(w.hub, "delete", "cluster", winner, "--timeout=60s")
		w.wantNoCluster(winner)
		w.wantBare(plane)
	}
}

func runs(cmd *exec.Cmd) error {
	_, err := output(cmd)
	return err
}

// races races requests, which is where the hub decides: of the same id under two names, and of two ids under one name.
// Exactly one of each two gets a certificate, and the other is told why not.
func (w *world) races() {
	w.t.Helper()
	var all sync.WaitGroup
	failures := make([]error, races+sameName)
	gate := make(chan struct{}, lanes)
	for round := range failures {
		all.Go(func() {
			gate <- struct{}{}
			defer func() { <-gate }()
			failures[round] = w.race(round)
		})
	}
	all.Wait()
	if err := errors.Join(failures...); err != nil {
		w.t.Error(err)
	}
	// The winners leave; of the losers there never was anything.
	w.kubectl(w.hub, "delete", "clusters", "-l", raced+"=true", "--timeout=120s")
	w.eventually("nothing is left of the races", func() error {
		for key := range w.dump(w.hub) {
			if strings.Contains(key, raced) {
				return errors.New("there is " + key)
			}
		}
		return nil
	})
}

// raced is how the names of all begin that are registered in races.
const raced = "raced"

// contender is one of two who want the same.
type contender struct {
	name, id string
	decision decision
	err      error
}

// race is one race.
func (w *world) race(round int) error {
	one := contender{name: fmt.Sprintf("%s-%d-a", raced, round), id: string(uuid.NewUUID())}
	two := contender{name: fmt.Sprintf("%s-%d-b", raced, round), id: one.id}
	if round >= races {
		two = contender{name: one.name, id: string(uuid.NewUUID())}
	}
	contenders := []*contender{&one, &two}
	var pair sync.WaitGroup
	for _, c := range contenders {
		token, err := w.makeToken()
		if err != nil {
			return err
		}
		config := w.bearer(token.String())
		pair.Go(func() {
			var name string
			if name, c.err = w.files(config, honest(c.name, c.id)); c.err == nil {
				c.decision, c.err = w.decided(name)
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
		return fmt.Errorf("%s: the loser was told %q, want %q", what, loser.decision.message, want)
	}
	if err := w.won(winner, loser); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// won checks that the hub knows the winner and not the loser, and marks the winner.
func (w *world) won(winner, loser contender) error {
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
	mark := fmt.Appendf(nil, `{"metadata":{"labels":{%q:"true"}}}`, raced)
	cluster := &clusterv1alpha1.Cluster{}
	cluster.Name = winner.name
	return hub.Patch(w.t.Context(), cluster, client.RawPatch(types.MergePatchType, mark))
}
