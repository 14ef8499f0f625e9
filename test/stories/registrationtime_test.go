package stories

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// registrationGoal is the intended time of a registration on control planes that have served one before. This machine
// may need longer: the story fails only after waitTimeout.
const registrationGoal = 5 * time.Second

// TestRegistrationTime logs the time of a registration in each mode, from the start of the command until the cluster is
// READY.
func TestRegistrationTime(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	member := w.member("measured")
	const rounds = 3
	table := fmt.Sprintf("registration, command started to READY true (goal %s):\n%-42s %s\n", registrationGoal, "mode", "each of the rounds")
	for _, mode := range []struct{ name, flags string }{
		{"pull, registered and applied in one", "--pullmode --apply-to-kubeconfig=" + member.Kubeconfig},
		{"push, by kubeconfig", "--kubeconfig=" + member.Kubeconfig},
	} {
		var took []time.Duration
		for range rounds {
			began := time.Now()
			registered := w.start("register", w.hub, "sveltosctl", append([]string{"register", "cluster", "--namespace=timed", "--cluster=measured"}, strings.Fields(mode.flags)...)...)
			w.pollReady("timed", "measured")
			took = append(took, time.Since(began).Round(10*time.Millisecond))
			<-registered.exited
			w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=timed", "--cluster=measured")
			w.wantNoAgent(member)
		}
		slices.Sort(took)
		table += fmt.Sprintf("%-42s %s\n", mode.name, strings.Trim(fmt.Sprint(took), "[]"))
	}
	t.Log(table)
}

// pollReady waits for READY with shorter pauses than eventually.
func (w *world) pollReady(namespace, cluster string) {
	w.t.Helper()
	c := w.client(w.hub)
	err := wait.PollUntilContextTimeout(w.t.Context(), 10*time.Millisecond, waitTimeout, true, func(ctx context.Context) (bool, error) {
		found := &libv1beta1.SveltosCluster{}
		err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: cluster}, found)
		return err == nil && found.Status.Ready, client.IgnoreNotFound(err)
	})
	if err != nil {
		w.t.Fatalf("cluster %s/%s is not ready within %s: %v", namespace, cluster, waitTimeout, err)
	}
}
