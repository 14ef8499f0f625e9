package attacks

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/sandbox"
)

// Scripts of checks: one that passes, and two that use all memory and all time. The first one needs millions of steps:
// a short one may end before another goroutine of its process uses memory.
const (
	passingScript    = `function evaluate() local n = 0; for i = 1, 1e6 do n = n + i end; return {pass = n > 0} end`
	allocatingScript = `function evaluate() local t = {}; for i = 1, 1e9 do t[i] = {i} end; return {pass = true} end`
	loopingScript    = `function evaluate() while true do end end`
)

// TestChecksBesideARollout: the process of the hub, or of an agent, uses much memory for a rollout, and the checks of
// other clusters use all the memory and time that they can get. A healthy cluster stays healthy.
func TestChecksBesideARollout(t *testing.T) {
	w := newWorld(t)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go useMemory(stop, stopped)
	t.Cleanup(func() { close(stop); <-stopped })

	owner := w.clusterOwner()
	var lists atomic.Int64 // requests for the checks of the healthy cluster
	pods := func(rw http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprint(rw, `{"kind":"PodList","apiVersion":"v1","items":[{"metadata":{"name":"p"}}]}`) // the hub may have closed the connection
	}
	healthy, _ := w.hostileMember(nil, func(rw http.ResponseWriter, r *http.Request) { lists.Add(1); pods(rw, r) })
	passing := libv1beta1.SveltosClusterSpec{ReadinessChecks: podChecks(passingScript), LivenessChecks: podChecks(passingScript)}
	w.pushCluster(owner, "healthy", passing, healthy)
	other, _ := w.hostileMember(nil, pods)
	for name, script := range map[string]string{"allocating": allocatingScript, "looping": loopingScript} {
		w.pushCluster(owner, name, libv1beta1.SveltosClusterSpec{ReadinessChecks: podChecks(script)}, other)
	}
	statusOf := func(name string) (libv1beta1.SveltosClusterStatus, error) {
		cluster := &libv1beta1.SveltosCluster{}
		err := w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: name}, cluster)
		return cluster.Status, err
	}
	for name, want := range map[string]string{"allocating": "memory", "looping": "steps"} {
		w.eventually("the check of "+name+" fails", func() error {
			status, err := statusOf(name)
			return errors.Join(err, wantText(status.FailureMessage, want))
		})
	}
	// Each change of an annotation causes a contact. It begins after the status of the previous contact is written.
	for i := range 6 {
		before := lists.Load()
		patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"attempt":"%d"}}}`, i))
		w.noError(owner.Patch(t.Context(), &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "healthy"}}, patch))
		w.eventually("the healthy cluster is ready", func() error {
			contacts := lists.Load() - before
			status, err := statusOf("healthy")
			if status.FailureMessage != "" || status.ConnectionFailures > 0 || status.ConnectionStatus == libv1beta1.ConnectionDown {
				t.Fatalf("the healthy cluster has the status %+v", status)
			}
			if err == nil && (!status.Ready || contacts == 0) {
				err = fmt.Errorf("ready: %t, contacts: %d", status.Ready, contacts)
			}
			return err
		})
	}

	// This is how the agent of a cluster in pull mode runs its checks, in its own child process.
	program, err := os.Executable()
	w.noError(err)
	checker := check.Checker{Sandbox: sandbox.NewPool([]string{program, "sandbox"}, clock.RealClock{})}
	for range 20 { // each time at another step of the rollout
		result, err := checker.EvaluateCluster(t.Context(), w.Client, &passing, false)
		if err != nil || result.Failure != "" || !result.Ready {
			t.Fatalf("the check in pull mode: %+v, %v", result, err)
		}
	}
}

// podChecks returns a check of the pods of a cluster with a script.
func podChecks(script string) []libv1beta1.ClusterCheck {
	return []libv1beta1.ClusterCheck{{
		Name: "check", Condition: script, ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "Pod"}},
	}}
}

// useMemory allocates and frees memory until stop is closed: more than a script may use.
func useMemory(stop <-chan struct{}, stopped chan<- struct{}) {
	defer close(stopped)
	var held [][]byte
	for {
		select {
		case <-stop:
			return
		default:
		}
		if held = append(held, make([]byte, 16<<20)); len(held) == 20 {
			held = nil
		}
	}
}
