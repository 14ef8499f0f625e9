package deregistration_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// setStatus sets a status of the cluster that the hub has not written.
func (w *testEnv) setStatus(change func(*libv1beta1.SveltosClusterStatus)) {
	w.Helper()
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	change(&w.cluster.Status)
	w.must(w.Status().Update(w.Context(), w.cluster))
}

// reconcile runs the controller once and reads the cluster.
func (w *testEnv) reconcile() {
	w.Helper()
	_, err := w.controller.Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
	w.must(err)
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
}

// annotate sets an annotation of the cluster.
func (w *testEnv) annotate(key, value string) {
	w.Helper()
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	before := w.cluster.DeepCopy()
	metav1.SetMetaDataAnnotation(&w.cluster.ObjectMeta, key, value)
	w.must(w.Patch(w.Context(), w.cluster, client.MergeFrom(before)))
}

func TestNoStatusEndsTheGracePeriod(t *testing.T) {
	t.Parallel()
	statuses := map[string]libv1beta1.SveltosClusterStatus{
		"down":    {Ready: true, ConnectionStatus: libv1beta1.ConnectionDown, ConnectionFailures: 3},
		"healthy": {Ready: true, ConnectionStatus: libv1beta1.ConnectionHealthy},
		"cleared": {},
	}
	for name, status := range statuses {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hubClient, plane := newHub(t)
			w := newTestEnv(t, hubClient, plane.Namespace(t, "departures"), libv1beta1.SveltosClusterSpec{CleanupGracePeriod: &metav1.Duration{Duration: time.Second}})
			w.setStatus(func(s *libv1beta1.SveltosClusterStatus) { *s = status })
			w.reconcile()
			w.clock.Step(80 * time.Second)
			w.reconcile()
			if strings.Contains(w.cluster.Annotations[kube.AnnotationDeregister], kube.DeregisterForce) {
				t.Errorf("it is forced 80 s after the last heartbeat: %v, %q", w.cluster.Annotations, w.cluster.Status.FailureMessage)
			}
			w.clock.Step(11 * time.Second)
			w.wantDeleted()
		})
	}
}

func TestDeregistrationWaitsForSummaryWithoutLabels(t *testing.T) {
	t.Parallel()
	hubClient, plane := newHub(t)
	namespace := plane.Namespace(t, "departures")
	for _, name := range []string{"one", "other"} {
		w := &testEnv{TB: t, Client: hubClient}
		w.must(hubClient.Create(t.Context(), &configv1beta1.ClusterSummary{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Finalizers: []string{configv1beta1.ClusterSummaryFinalizer}},
			Spec:       configv1beta1.ClusterSummarySpec{ClusterNamespace: namespace, ClusterName: name, ClusterType: libv1beta1.ClusterTypeSveltos},
		}))
	}
	w := newTestEnv(t, hubClient, namespace, libv1beta1.SveltosClusterSpec{})
	w.reconcile()
	if want := "ClusterSummary " + namespace + "/one to be withdrawn"; !strings.HasSuffix(w.cluster.Status.FailureMessage, want) {
		t.Errorf("it waits for %q, want %q", w.cluster.Status.FailureMessage, want)
	}
}

func TestForeignDeadlineIsIgnored(t *testing.T) {
	t.Parallel()
	hubClient, plane := newHub(t)
	namespace := plane.Namespace(t, "departures")
	w := newTestEnv(t, hubClient, namespace, libv1beta1.SveltosClusterSpec{})
	w.must(hubClient.Create(t.Context(), &configv1beta1.ClusterSummary{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "s", Finalizers: []string{configv1beta1.ClusterSummaryFinalizer}},
		Spec:       configv1beta1.ClusterSummarySpec{ClusterNamespace: namespace, ClusterName: "one", ClusterType: libv1beta1.ClusterTypeSveltos},
	}))
	w.annotate(kube.AnnotationDeregister, kube.DeregisterForce)
	w.annotate(kube.AnnotationDeadline, "2099-01-01T00:00:00Z")
	w.reconcile()
	w.clock.Step(21 * time.Second)
	w.reconcile()
	if how := strings.Split(w.cluster.Annotations[kube.AnnotationDeregister], ","); !slices.Contains(how, kube.DeregisterAbandon) {
		t.Errorf("it is not abandoned: %v", w.cluster.Annotations)
	}
}

func TestStaleConfirmationOfAgentIsIgnored(t *testing.T) {
	t.Parallel()
	hubClient, plane := newHub(t)
	w := newTestEnv(t, hubClient, plane.Namespace(t, "departures"), libv1beta1.SveltosClusterSpec{})
	// It comes from a backup.
	w.setStatus(func(s *libv1beta1.SveltosClusterStatus) {
		s.Ready, s.AgentRemovedAt = true, &metav1.Time{Time: time.Now()}
	})
	for range 3 {
		w.want("its agent to remove itself", 30*time.Second, false)
		if order := w.cluster.Annotations[kube.AnnotationAgentRequest]; order != kube.AgentRequestRemove {
			t.Errorf("the agent is ordered to %q", order)
		}
	}
	w.setStatus(func(s *libv1beta1.SveltosClusterStatus) { s.AgentRemovedAt = &metav1.Time{Time: time.Now()} })
	w.wantDeleted()
}

func TestHeartbeatOfAgentWithWrongClockCounts(t *testing.T) {
	t.Parallel()
	hubClient, plane := newHub(t)
	w := newTestEnv(t, hubClient, plane.Namespace(t, "departures"), libv1beta1.SveltosClusterSpec{CleanupGracePeriod: &metav1.Duration{Duration: time.Second}})
	w.reconcile()
	lease := &coordinationv1.Lease{}
	w.must(hubClient.Get(t.Context(), client.ObjectKeyFromObject(w.cluster), lease))
	for range 3 {
		w.clock.Step(80 * time.Second)
		lease.Spec.RenewTime = &metav1.MicroTime{Time: w.clock.Now().Add(-time.Hour)}
		w.must(hubClient.Update(t.Context(), lease))
		w.want("its agent to remove itself", 30*time.Second, false)
	}
	w.clock.Step(91 * time.Second)
	w.wantDeleted()
}
