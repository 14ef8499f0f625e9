package join_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube/faults"
)

// requestFaults are the faults of one request. Each takes the registration's cancel function.
var requestFaults = map[string]func(cancel func()) faults.Effect{
	"refused":     func(func()) faults.Effect { return faults.Refuse },
	"answer-lost": func(func()) faults.Effect { return faults.LoseResponse },
	"interrupted": faults.Interrupt,
	"forbidden":   func(func()) faults.Effect { return faults.Forbid },
}

// leftBy returns the remaining objects of a registration of cluster c in the namespace.
func leftBy(t *testing.T, hubClient client.Client, namespace string) []string {
	t.Helper()
	left := inNamespace(t, hubClient, namespace)
	for _, name := range inNamespace(t, hubClient, kube.AgentNamespace) {
		if strings.HasPrefix(name, namespace+":") {
			left = append(left, name)
		}
	}
	return left
}

func TestAFailureAtAnyStepOfAFirstRegistrationLeavesNothing(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	// The shared Role stays, so that the first registration of all writes more.
	registered(t, plane, pullRequest(plane.Namespace(t, "warm"), "c"))
	count := &faults.Fault{}
	if err := join.RegisterPull(t.Context(), count.On(plane.Config), pullRequest("fault-count", "c"), io.Discard); err != nil {
		t.Fatal(err)
	}
	steps := count.Seen()
	if steps < 10 {
		t.Fatalf("writing requests: got %d, want at least ten", steps)
	}
	for kind, effect := range requestFaults {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			for at := int64(1); at <= steps; at++ {
				r := pullRequest(fmt.Sprintf("fault-%s-%d", kind, at), "c")
				ctx, cancel := context.WithCancel(t.Context())
				f := &faults.Fault{At: at, Effect: effect(cancel)}
				err := join.RegisterPull(ctx, f.On(plane.Config), r, io.Discard)
				cancel()
				if err == nil {
					t.Errorf("step %d: got no error", at)
					continue
				}
				if left := leftBy(t, hubClient, r.Namespace); len(left) > 0 {
					t.Errorf("step %d: left: %v", at, left)
				}
				made := &corev1.Namespace{}
				if err := hubClient.Get(t.Context(), client.ObjectKey{Name: r.Namespace}, made); err == nil && made.DeletionTimestamp == nil {
					t.Errorf("step %d: the namespace that was made is still there", at)
				}
			}
		})
	}
}

func TestAFailureAtAnyStepOfAnotherRegistrationKeepsTheFirst(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	for kind, effect := range requestFaults {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := pullRequest(plane.Namespace(t, "refault"), "c")
			config, _ := agentConfig(t, registered(t, plane, r))
			before := leftBy(t, hubClient, r.Namespace)
			for at := int64(1); ; at++ {
				again := r
				again.Labels = map[string]string{"step": fmt.Sprint(at)}
				ctx, cancel := context.WithCancel(t.Context())
				f := &faults.Fault{At: at, Effect: effect(cancel)}
				err := join.RegisterPull(ctx, f.On(plane.Config), again, io.Discard)
				cancel()
				if err == nil {
					if f.Seen() >= at {
						t.Errorf("step %d: got no error", at)
					}
					break
				}
				if diff := cmp.Diff(before, leftBy(t, hubClient, r.Namespace)); diff != "" {
					t.Errorf("step %d: objects (-before +after):\n%s", at, diff)
				}
				if labels := labelsOf(t, hubClient, r.Request); len(labels) > 0 {
					t.Errorf("step %d: labels: got %v, want none", at, labels)
				}
				if !accepted(t, config, r.Namespace) {
					t.Errorf("step %d: the first registration's credential is not accepted any more", at)
				}
			}
		})
	}
}

// A running hub adds its finalizer, and repairs missing objects, during the registration.
func TestRollbackWaitsForTheHub(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	r := pullRequest(plane.Namespace(t, "withhub"), "c")
	took := make(chan error, 1)
	out := writer(func([]byte) (int, error) {
		cluster := clusterNamed(t, hubClient, r.Namespace, "c")
		cluster.Finalizers = []string{kube.FinalizerCluster}
		if err := hubClient.Update(t.Context(), cluster); err != nil {
			return 0, err
		}
		go func() {
			took <- removeFinalizers(t.Context(), hubClient, client.ObjectKeyFromObject(cluster))
		}()
		return 0, errors.New("broken pipe")
	})
	wantText(t, join.RegisterPull(t.Context(), plane.Config, r, out), "broken pipe")
	if err := <-took; err != nil {
		t.Error(err)
	}
	if left := leftBy(t, hubClient, r.Namespace); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// removeFinalizers takes the finalizer off a SveltosCluster once it is being deleted, as the hub does; before that it
// must not have lost its identity.
func removeFinalizers(ctx context.Context, hubClient client.Client, key client.ObjectKey) error {
	cluster := &libv1beta1.SveltosCluster{}
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, 20*time.Second, true, func(ctx context.Context) (bool, error) {
		err := hubClient.Get(ctx, key, cluster)
		return err == nil && cluster.DeletionTimestamp != nil, err
	})
	if err != nil {
		return err
	}
	if err := hubClient.Get(ctx, key, &corev1.ServiceAccount{}); err != nil {
		return fmt.Errorf("the identity went before the SveltosCluster: %w", err)
	}
	return hubClient.Patch(ctx, cluster, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }
