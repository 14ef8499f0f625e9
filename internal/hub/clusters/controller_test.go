package clusters_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/yaml"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/api/crds"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/hub/clusters"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// noon is the time at which the tests begin.
var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// world is a hub with one member, the hub's own cluster. Tests call Reconcile of its controller.
type world struct {
	testing.TB
	client.Client
	clock      *clocktesting.FakeClock
	events     *events.FakeRecorder
	controller *clusters.Controller
	cluster    *clusterv1alpha1.Cluster
	// away is true if the hub's API server does not answer; otherwise it has answered since back.
	away bool
	back time.Time
}

func newWorld(t *testing.T, name string, spec clusterv1alpha1.ClusterSpec) *world {
	t.Helper()
	plane := localkube.Shared(t)
	hub, err := client.NewWithWatch(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	installCRD(t, hub)
	w := &world{TB: t, Client: hub, clock: clocktesting.NewFakeClock(noon), events: events.NewFakeRecorder(100)}
	w.controller = &clusters.Controller{
		Hub: hub, MemberConfig: dialling(plane.Config, nil), Events: w.events, Clock: w.clock,
	}
	w.startMonitor()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.controller.Start(ctx) }()
	w.cluster = &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{"example.com/test"}}, Spec: spec}
	w.must(hub.Create(t.Context(), w.cluster))
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		free := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		if err := hub.Patch(context.WithoutCancel(t.Context()), w.cluster, free); err != nil {
			t.Error(err)
		}
	})
	return w
}

// startMonitor replaces the Heartbeats of the controller, as after a restart of the hub.
func (w *world) startMonitor() {
	w.controller.Heartbeats = &heartbeats.Monitor{Hub: w.Client, Live: w.Client, Clock: w.clock, AvailableSince: func() time.Time {
		if w.away {
			return w.clock.Now()
		}
		return w.back
	}}
}

func dialling(config *rest.Config, err error) func(context.Context, fleet.Member) (*rest.Config, error) {
	return func(context.Context, fleet.Member) (*rest.Config, error) { return config, err }
}

// crdOnce serves the tests of this binary, which share a control plane.
var crdOnce sync.Mutex

func installCRD(t *testing.T, hub client.Client) {
	t.Helper()
	crdOnce.Lock()
	defer crdOnce.Unlock()
	files, err := fs.Glob(crds.FS, "cluster.karmada.io_clusters.yaml")
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	text, err := fs.ReadFile(crds.FS, files[0])
	if err != nil {
		t.Fatal(err)
	}
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.Unmarshal(text, crd); err != nil {
		t.Fatal(err)
	}
	if err := hub.Create(t.Context(), crd); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	err = wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		return hub.List(ctx, &clusterv1alpha1.ClusterList{}) == nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// reconcile runs the controller once, and returns RequeueAfter.
func (w *world) reconcile() time.Duration {
	w.Helper()
	result, err := w.controller.Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
	w.must(err)
	w.read()
	return result.RequeueAfter
}

func (w *world) read() {
	w.Helper()
	w.cluster = &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: w.cluster.Name}}
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
}

// want reconciles, and checks the prefix of Ready and the taints.
func (w *world) want(ready string, taints ...string) {
	w.Helper()
	w.reconcile()
	if got := w.ready(); !strings.HasPrefix(got, ready) {
		w.Errorf("Ready is %q, want %q", got, ready)
	}
	var have []string
	for _, taint := range w.cluster.Spec.Taints {
		have = append(have, strings.TrimPrefix(taint.ToString(), "cluster.karmada.io/"))
	}
	if got, want := strings.Join(have, " "), strings.Join(taints, " "); got != want {
		w.Errorf("the taints are %q, want %q", got, want)
	}
}

// ready returns the condition Ready as status/reason: message.
func (w *world) ready() string {
	c := meta.FindStatusCondition(w.cluster.Status.Conditions, clusterv1alpha1.ClusterConditionReady)
	if c == nil {
		return ""
	}
	return string(c.Status) + "/" + c.Reason + ": " + c.Message
}

// wantFailures checks the number of consecutive failed observations.
func (w *world) wantFailures(want int) {
	w.Helper()
	if got, ok := w.controller.Failures(w.cluster.Name); got != want || !ok {
		w.Errorf("%d failures, known: %t, want %d", got, ok, want)
	}
}

// wantEvents checks the events since the last call.
func (w *world) wantEvents(want ...string) {
	w.Helper()
	var got []string
	for len(w.events.Events) > 0 {
		got = append(got, <-w.events.Events)
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		w.Errorf("events are %q, want %q", got, want)
	}
}

// change changes the spec as a user does.
func (w *world) change(change func(*clusterv1alpha1.ClusterSpec)) {
	w.Helper()
	before := w.cluster.DeepCopy()
	change(&w.cluster.Spec)
	w.must(w.Patch(w.Context(), w.cluster, client.MergeFrom(before)))
}

// report writes the condition Ready as an agent does.
func (w *world) report(status metav1.ConditionStatus, reason, message string) {
	w.Helper()
	w.read()
	before := w.cluster.DeepCopy()
	meta.SetStatusCondition(&w.cluster.Status.Conditions, metav1.Condition{
		Type: clusterv1alpha1.ClusterConditionReady, Status: status, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(w.clock.Now()),
	})
	w.must(w.Status().Patch(w.Context(), w.cluster, client.MergeFrom(before)))
}

const (
	notReady    = "not-ready:NoSchedule"
	unreachable = "unreachable:NoSchedule"
)

func TestPushMemberIsObserved(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "push", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Push, Zone: "z1"})
	w.want("True/ClusterReady: ")
	w.wantEvents("Normal ClusterReady cluster push is ready, Kubernetes v1.36.3")
	status := w.cluster.Status
	if status.KubernetesVersion != "v1.36.3" || len(status.APIEnablements) == 0 || status.NodeSummary == nil || status.NodeSummary.ReadyNum != 1 {
		t.Errorf("the status is %+v", status)
	}
	if len(w.cluster.Spec.Zones) != 1 || w.cluster.Spec.Zones[0] != "z1" || w.cluster.Spec.Zone != "" {
		t.Errorf("zone is %q, zones are %q", w.cluster.Spec.Zone, w.cluster.Spec.Zones)
	}
	version := w.cluster.ResourceVersion
	if next := w.reconcile(); next < 10*time.Second || next > 11*time.Second {
		t.Errorf("it looks again after %s, want 10s", next)
	}
	if w.cluster.ResourceVersion != version {
		t.Error("a second look wrote something")
	}
	w.wantEvents()
}

// formatResourceModels returns the resource models in the spec as text: resource min..max of each.
func (w *world) formatResourceModels() []string {
	var all []string
	for _, model := range w.cluster.Spec.ResourceModels {
		text := fmt.Sprint(model.Grade)
		for _, within := range model.Ranges {
			text += fmt.Sprintf(" %s %s..%s", within.Name, within.Min.String(), within.Max.String())
		}
		all = append(all, text)
	}
	return all
}

func TestClusterWithoutResourceModelsGetsTheDefaults(t *testing.T) {
	t.Parallel()
	defaults := []string{
		"0 cpu 0..1 memory 0..4Gi", "1 cpu 1..2 memory 4Gi..16Gi", "2 cpu 2..4 memory 16Gi..32Gi", "3 cpu 4..8 memory 32Gi..64Gi", "4 cpu 8..16 memory 64Gi..128Gi",
		"5 cpu 16..32 memory 128Gi..256Gi", "6 cpu 32..64 memory 256Gi..512Gi", "7 cpu 64..128 memory 512Gi..1Ti",
		"8 cpu 128..9223372036854775807 memory 1Ti..9223372036854775807",
	}
	for name, mode := range map[string]clusterv1alpha1.ClusterSyncMode{"graded-push": clusterv1alpha1.Push, "graded-pull": clusterv1alpha1.Pull} {
		w := newWorld(t, name, clusterv1alpha1.ClusterSpec{SyncMode: mode})
		w.reconcile()
		if diff := cmp.Diff(w.formatResourceModels(), defaults); diff != "" {
			t.Errorf("%s: got -, want +\n%s", name, diff)
		}
		version := w.cluster.ResourceVersion
		if w.reconcile(); w.cluster.ResourceVersion != version {
			t.Errorf("%s: a second look wrote something", name)
		}
		// A user who applies a Cluster without resource models does not delete the defaults.
		applied := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": name}, "spec": map[string]any{"syncMode": string(mode), "region": "north"}}}
		applied.SetGroupVersionKind(clusterv1alpha1.GroupVersion.WithKind(clusterv1alpha1.ClusterKind))
		w.must(w.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(applied), client.FieldOwner("kubectl"), client.ForceOwnership))
		w.read()
		if diff := cmp.Diff(w.formatResourceModels(), defaults); diff != "" || w.cluster.Spec.Region != "north" {
			t.Errorf("%s: it was applied: got -, want +\n%s", name, diff)
		}
		own := []clusterv1alpha1.ResourceModel{{Grade: 0, Ranges: []clusterv1alpha1.ResourceModelRange{{Name: "cpu", Max: resource.MustParse("7")}}}}
		w.change(func(s *clusterv1alpha1.ClusterSpec) { s.ResourceModels = own })
		w.reconcile()
		if diff := cmp.Diff(w.formatResourceModels(), []string{"0 cpu 0..7"}); diff != "" {
			t.Errorf("%s: people's own: got -, want +\n%s", name, diff)
		}
		w.change(func(s *clusterv1alpha1.ClusterSpec) { s.ResourceModels = nil })
		w.reconcile()
		if diff := cmp.Diff(w.formatResourceModels(), defaults); diff != "" {
			t.Errorf("%s: without people's own: got -, want +\n%s", name, diff)
		}
	}
}

func TestMemberWithRejectedSpecIsObserved(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "read-only", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Push})
	denied := errors.New("denied by a policy")
	w.controller.Hub = interceptor.NewClient(w.Client.(client.WithWatch), interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return denied
		},
	})
	for range 2 {
		_, err := w.controller.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(w.cluster)})
		if !errors.Is(err, denied) {
			t.Errorf("got %v, want that the spec may not be written", err)
		}
		w.read()
		if got := w.ready(); !strings.HasPrefix(got, "True/ClusterReady: ") {
			t.Errorf("Ready is %q", got)
		}
	}
	w.wantFailures(0)
}

func TestPushMemberFailsAndRecovers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "comes-back", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Push})
	var code atomic.Int32
	code.Store(http.StatusOK)
	api := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			out.WriteHeader(int(code.Load()))
			return
		}
		http.NotFound(out, r)
	}))
	t.Cleanup(api.Close)
	config := &rest.Config{Host: api.URL}
	w.controller.MemberConfig = dialling(config, nil)
	people := corev1.Taint{Key: "example.com/theirs", Effect: corev1.TaintEffectNoExecute}
	w.change(func(s *clusterv1alpha1.ClusterSpec) { s.Taints = []corev1.Taint{people} })
	theirs := people.ToString()
	w.want("True/ClusterReady: ", theirs)
	if w.cluster.Spec.Taints[0].TimeAdded == nil {
		t.Error("a NoExecute taint has no time")
	}
	w.wantEvents("Normal ClusterReady cluster comes-back is ready, Kubernetes ")
	w.wantFailures(0)
	code.Store(http.StatusServiceUnavailable)
	w.want("True/ClusterReady: ", theirs)
	w.clock.Step(29 * time.Second)
	w.want("True/ClusterReady: ", theirs)
	w.clock.Step(time.Second)
	w.want("False/ClusterNotReady: cluster is reachable, and not ready: /readyz answers 503 Service Unavailable", theirs, notReady)
	w.wantEvents("Warning ClusterNotReady cluster comes-back: cluster is reachable, and not ready: /readyz answers 503 Service Unavailable")
	w.wantFailures(3)
	code.Store(http.StatusOK)
	w.want("False/ClusterNotReady: ", theirs, notReady)
	w.wantFailures(0)
	w.clock.Step(30 * time.Second)
	w.want("True/ClusterReady: ", theirs)
	w.wantEvents("Normal ClusterReady cluster comes-back is ready, Kubernetes ")
	api.Close()
	w.want("True/ClusterReady: ", theirs)
	w.clock.Step(30 * time.Second)
	w.want("False/ClusterNotReachable: cluster is not reachable: dial tcp", theirs, notReady)
}

func TestPushMemberWithoutConfig(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "no-dial", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Push})
	config := localkube.Shared(t).Config
	w.controller.MemberConfig = dialling(nil, errors.New("spec.secretRef is not set"))
	w.want("False/StatusCollectionFailed: cluster cannot be dialled: spec.secretRef is not set", notReady)
	w.wantEvents("Warning StatusCollectionFailed cluster no-dial: cluster cannot be dialled: spec.secretRef is not set")
	w.wantFailures(1)
	w.controller.MemberConfig = dialling(config, nil)
	w.want("True/ClusterReady: ")
	w.wantEvents("Normal ClusterReady cluster no-dial is ready, Kubernetes v1.36.3")
	w.clock.Step(time.Hour)
	w.controller.MemberConfig = dialling(nil, apierrors.NewTimeoutError("the hub is busy", 1))
	w.want("True/ClusterReady: ")
	w.clock.Step(time.Hour)
	w.controller.MemberConfig = dialling(nil, apierrors.NewNotFound(corev1.Resource("secrets"), "creds"))
	w.want(`False/StatusCollectionFailed: cluster cannot be dialled: secrets "creds" not found`, notReady)
}

func TestPushMemberWhoseRegistrationIsNotFinished(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "unfinished", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Push})
	annotate := func(value string) {
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"towline.dev/registration-unfinished":`+value+`}}}`))
		w.must(w.Patch(t.Context(), w.cluster, patch))
	}
	annotate(`"true"`)
	w.controller.MemberConfig = dialling(nil, fmt.Errorf("read secret: %w", apierrors.NewNotFound(corev1.Resource("secrets"), "creds")))
	w.want("False/RegistrationNotFinished: its registration is not finished", notReady)
	w.wantEvents()
	if failures, known := w.controller.Failures("unfinished"); known {
		t.Errorf("%d failures are counted", failures)
	}
	annotate("null")
	w.want("False/StatusCollectionFailed: ", notReady)
	w.wantFailures(1)
	annotate(`"true"`)
	w.controller.MemberConfig = dialling(localkube.Shared(t).Config, nil)
	w.want("True/ClusterReady: ")
}

func TestRefusedMemberIsIgnored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "taken", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Push})
	w.report(metav1.ConditionFalse, fleet.ReasonIDTaken, "somebody else's")
	version := w.cluster.ResourceVersion
	w.want("False/" + fleet.ReasonIDTaken)
	if w.cluster.ResourceVersion != version {
		t.Error("something was written")
	}
}

func TestMemberThatIsRefusedDuringTheObservationIsIgnored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "taken-meanwhile", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Push})
	config := localkube.Shared(t).Config
	w.controller.MemberConfig = func(context.Context, fleet.Member) (*rest.Config, error) {
		w.report(metav1.ConditionFalse, fleet.ReasonIDTaken, "somebody else's")
		return config, nil
	}
	w.want("False/" + fleet.ReasonIDTaken)
	w.want("False/" + fleet.ReasonIDTaken)
}

func TestDeletedMemberGetsNoTaints(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "leaves", clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Push, Zone: "z1"})
	w.must(w.Delete(t.Context(), w.cluster))
	w.controller.MemberConfig = dialling(nil, errors.New("its credentials are gone"))
	w.want("False/StatusCollectionFailed: ")
	w.wantEvents()
	if w.cluster.Spec.Zone != "z1" || w.cluster.Spec.ResourceModels != nil {
		t.Error("the spec was changed")
	}
}
