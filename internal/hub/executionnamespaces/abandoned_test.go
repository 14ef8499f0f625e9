package executionnamespaces_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/executionnamespaces"
	"github.com/towline/towline/internal/kube"
)

// manualController is a controller without a manager, for the Clusters of its own shard. Tests call reconcile.
type manualController struct {
	*testEnv
	clock      *clocktesting.FakeClock
	controller *executionnamespaces.Controller
	forgotten  []string
}

func newManualController(t *testing.T, w *testEnv) *manualController {
	t.Helper()
	s := &manualController{testEnv: w, clock: clocktesting.NewFakeClock(time.Now())}
	s.controller = &executionnamespaces.Controller{
		Heartbeats: &heartbeats.Monitor{Clock: s.clock},
		Hub:        w.hubClient, Live: w.hubClient, Shard: "stepped", Events: events.NewFakeRecorder(100), Clock: s.clock,
		Config: func(context.Context, fleet.Member) (*rest.Config, error) { return nil, errors.New("unreachable") },
		Forget: func(member string) { s.forgotten = append(s.forgotten, member) },
	}
	return s
}

// startRemoval creates a ready Cluster in this mode with a Work, and deletes the Cluster.
func (s *manualController) startRemoval(t *testing.T, name string, mode clusterv1alpha1.ClusterSyncMode) *workv1alpha1.Work {
	t.Helper()
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{ID: name, SyncMode: mode}}
	c.Annotations = map[string]string{libv1beta1.ShardAnnotation: "stepped"}
	if err := s.hubClient.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	s.reconcile(t, name)
	if mode == clusterv1alpha1.Pull {
		s.renewLease(t, name)
	}
	s.setReady(t, name, metav1.ConditionTrue)
	work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + name, Name: "w", Finalizers: []string{workv1alpha1.ExecutionFinalizer}}}
	if err := errors.Join(s.hubClient.Create(t.Context(), work), s.hubClient.Delete(t.Context(), c)); err != nil {
		t.Fatal(err)
	}
	s.reconcile(t, name)
	return work
}

// reconcile reconciles once, after the heartbeat monitor has evaluated the Lease of the agent.
func (s *manualController) reconcile(t *testing.T, name string) {
	t.Helper()
	lease := &coordinationv1.Lease{}
	if err := s.hubClient.Get(t.Context(), client.ObjectKey{Namespace: "karmada-es-" + name, Name: name}, lease); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	if c := s.getCluster(t, name); c != nil {
		s.controller.Heartbeats.EvaluateLease(fleet.FromCluster(c), lease, "")
	}
	if _, err := s.controller.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Name: name}}); err != nil {
		t.Fatal(err)
	}
}

func TestRemovalWaitsUntilSilentAgentIsDead(t *testing.T) {
	t.Parallel()
	s := newManualController(t, sharedEnv(t))
	work := s.startRemoval(t, "just-died", clusterv1alpha1.Pull)
	s.clock.Step(36 * time.Second)
	s.reconcile(t, "just-died")
	if !s.exists(t, s.hubClient, work) {
		t.Fatal("the removal does not wait for an agent that has been silent for 36 s")
	}
	s.clock.Step(2 * time.Second)
	for range 3 {
		s.reconcile(t, "just-died")
	}
	if c := (&clusterv1alpha1.Cluster{ObjectMeta: named("just-died")}); s.exists(t, s.hubClient, c) {
		t.Errorf("the removal still waits after 38 s: %v", c.Annotations)
	}
}

func TestRemovalWaitsForAgentThatIsAlive(t *testing.T) {
	t.Parallel()
	s := newManualController(t, sharedEnv(t))
	work := s.startRemoval(t, "busy", clusterv1alpha1.Pull)
	for range 10 {
		s.clock.Step(11 * time.Second)
		s.renewLease(t, "busy")
		s.reconcile(t, "busy")
	}
	if !s.exists(t, s.hubClient, work) {
		t.Error("the removal does not wait for an agent that renews its Lease")
	}
	for range 3 {
		s.clock.Step(11 * time.Second)
		s.reconcile(t, "busy")
	}
	if s.exists(t, s.hubClient, &clusterv1alpha1.Cluster{ObjectMeta: named("busy")}) {
		t.Error("the removal waits without a limit for an agent that only renews its Lease")
	}
}

func TestOperationsOnAbandonedClusterAreCanceled(t *testing.T) {
	t.Parallel()
	tests := map[string]func(*manualController, *testing.T, *clusterv1alpha1.Cluster){
		"by-time": func(s *manualController, _ *testing.T, _ *clusterv1alpha1.Cluster) { s.clock.Step(21 * time.Second) },
		"by-force": func(s *manualController, t *testing.T, c *clusterv1alpha1.Cluster) {
			forced := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"`+kube.AnnotationDeregister+`":"abandon,force"}}}`))
			if err := s.hubClient.Patch(t.Context(), c, forced); err != nil {
				t.Fatal(err)
			}
		},
		"not-ready": func(s *manualController, t *testing.T, c *clusterv1alpha1.Cluster) {
			s.setReady(t, c.Name, metav1.ConditionFalse)
		},
	}
	for name, giveUp := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newManualController(t, sharedEnv(t))
			work := s.startRemoval(t, name, clusterv1alpha1.Push)
			if len(s.forgotten) > 0 {
				t.Error("operations are canceled at once")
			}
			giveUp(s, t, &clusterv1alpha1.Cluster{ObjectMeta: named(name)})
			s.reconcile(t, name)
			member := fleet.FromCluster(&clusterv1alpha1.Cluster{ObjectMeta: named(name)}).Key()
			if !slices.Contains(s.forgotten, member) || !s.exists(t, s.hubClient, work) {
				t.Errorf("forgotten: %v, want %s while the Work waits for the removal of its finalizer", s.forgotten, member)
			}
			// No controller removes the finalizer of the Work.
			s.clock.Step(21 * time.Second)
			for range 3 {
				s.reconcile(t, name)
			}
			if s.exists(t, s.hubClient, &clusterv1alpha1.Cluster{ObjectMeta: named(name)}) {
				t.Error("the Cluster is not deleted")
			}
		})
	}
}

func TestRemovalOfAnUnfinishedRegistrationReportsNoAccount(t *testing.T) {
	t.Parallel()
	for annotation, want := range map[string]bool{"towline.dev/registration-unfinished": false, "example.com/finished": true} {
		s := newManualController(t, sharedEnv(t))
		s.controller.Config = func(context.Context, fleet.Member) (*rest.Config, error) {
			return nil, apierrors.NewNotFound(corev1.Resource("secrets"), "credentials")
		}
		name := "without-secret-" + strconv.FormatBool(want)
		c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{
			ID: name, SyncMode: clusterv1alpha1.Push, SecretRef: &clusterv1alpha1.LocalSecretReference{Namespace: "default", Name: name},
		}}
		c.Annotations = map[string]string{libv1beta1.ShardAnnotation: "stepped", annotation: "true"}
		if err := s.hubClient.Create(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		s.reconcile(t, name)
		if err := s.hubClient.Delete(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the Cluster "+name+" is deleted", func() bool {
			s.reconcile(t, name)
			return s.getCluster(t, name) == nil
		})
		isReported := false
		for recorded := s.controller.Events.(*events.FakeRecorder).Events; len(recorded) > 0; {
			isReported = strings.Contains(<-recorded, "LeftBehind") || isReported
		}
		if isReported != want {
			t.Errorf("%s: the account is reported: %t, want %t", annotation, isReported, want)
		}
	}
}
