package works_test

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/api/crds"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/works"
)

// world has an execution space, and a member with a namespace for objects and one for inventories, all on the shared
// API server.
type world struct {
	testing.TB
	client.Client
	plane   *localkube.Plane
	space   string
	objects string
	records string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	plane := localkube.Shared(t)
	hub, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	installCRD(t, hub)
	w := &world{
		TB: t, Client: hub, plane: plane,
		space: plane.Namespace(t, "karmada-es"), objects: plane.Namespace(t, "objects"), records: plane.Namespace(t, "records"),
	}
	t.Cleanup(func() {
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		var list workv1alpha1.WorkList
		w.noError(hub.List(context.WithoutCancel(t.Context()), &list, client.InNamespace(w.space)))
		for i := range list.Items {
			w.noError(client.IgnoreNotFound(hub.Patch(context.WithoutCancel(t.Context()), &list.Items[i], patch)))
		}
	})
	return w
}

// crdOnce serialises the tests of this binary, which share a control plane.
var crdOnce sync.Mutex

func installCRD(t *testing.T, hub client.Client) {
	t.Helper()
	crdOnce.Lock()
	defer crdOnce.Unlock()
	raw, err := crds.FS.ReadFile("work.karmada.io_works.yaml")
	if err != nil {
		t.Fatal(err)
	}
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.Unmarshal(raw, crd); err != nil {
		t.Fatal(err)
	}
	if err := hub.Create(t.Context(), crd); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	err = wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		return hub.List(ctx, &workv1alpha1.WorkList{}) == nil, nil
	})
	if err != nil {
		t.Fatalf("wait for the CRD: %v", err)
	}
}

func (w *world) noError(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// engine returns an Engine in the state of a process that has just started.
func (w *world) engine() *engine.Engine {
	w.Helper()
	e, err := engine.New(w.plane.Config, engine.Options{Namespace: w.records, Hub: "hub", Scope: w.space})
	w.noError(err)
	return e
}

// executor returns an Executor in the state of a process that has just started.
func (w *world) executor() *works.Executor {
	return &works.Executor{Hub: w.Client, Engine: w.engine(), Clock: clock.RealClock{}}
}

// runEngine runs an engine, which corrects drift, until the test ends.
func (w *world) runEngine(t *testing.T) *engine.Engine {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	e := w.engine()
	go func() { done <- e.Run(ctx) }()
	t.Cleanup(func() { cancel(); w.noError(<-done) })
	return e
}

// createWork creates a Work of these manifests; OBJECTS in them stands for the namespace for objects.
func (w *world) createWork(name string, manifests ...string) *workv1alpha1.Work {
	w.Helper()
	work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{
		Namespace: w.space, Name: name, Finalizers: []string{workv1alpha1.ExecutionFinalizer},
	}}
	for _, manifest := range manifests {
		work.Spec.Workload.Manifests = append(work.Spec.Workload.Manifests, w.manifest(manifest))
	}
	w.noError(w.Create(w.Context(), work))
	return work
}

func (w *world) manifest(text string) workv1alpha1.Manifest {
	w.Helper()
	raw, err := yaml.YAMLToJSON([]byte(strings.ReplaceAll(text, "OBJECTS", w.objects)))
	w.noError(err)
	return workv1alpha1.Manifest{RawExtension: runtime.RawExtension{Raw: raw}}
}

func configMap(name, value string) string {
	return "{apiVersion: v1, kind: ConfigMap, metadata: {name: " + name + ", namespace: OBJECTS}, data: {key: '" + value + "'}}"
}

// getWork returns a Work, which must exist.
func (w *world) getWork(name string) *workv1alpha1.Work {
	w.Helper()
	work := &workv1alpha1.Work{}
	w.noError(w.Get(w.Context(), client.ObjectKey{Namespace: w.space, Name: name}, work))
	return work
}

// updateWork changes a Work as a user does.
func (w *world) updateWork(name string, edit func(*workv1alpha1.Work)) {
	w.Helper()
	work := w.getWork(name)
	edit(work)
	w.noError(w.Update(w.Context(), work))
}

func (w *world) isDeleted(name string) bool {
	w.Helper()
	err := w.Get(w.Context(), client.ObjectKey{Namespace: w.space, Name: name}, &workv1alpha1.Work{})
	w.noError(client.IgnoreNotFound(err))
	return err != nil
}

// execute executes the current version of a Work in a new process.
func (w *world) execute(name string, at works.ClusterState) error {
	w.Helper()
	return w.executor().Execute(w.Context(), w.getWork(name), at)
}

// value returns the data of a ConfigMap on the member, or "" if it does not exist.
func (w *world) value(name string) string {
	w.Helper()
	var cm corev1.ConfigMap
	err := w.Get(w.Context(), client.ObjectKey{Namespace: w.objects, Name: name}, &cm)
	w.noError(client.IgnoreNotFound(err))
	return cm.Data["key"]
}

// setValue creates or changes a ConfigMap on the member as another client does.
func (w *world) setValue(name, value string) {
	w.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.objects, Name: name}}
	if err := w.Get(w.Context(), client.ObjectKeyFromObject(cm), cm); err != nil {
		w.noError(client.IgnoreNotFound(err))
		cm.Data = map[string]string{"key": value}
		w.noError(w.Create(w.Context(), cm))
		return
	}
	cm.Data = map[string]string{"key": value}
	w.noError(w.Update(w.Context(), cm))
}

// wantCondition checks a condition, and its message unless that is "".
func (w *world) wantCondition(name, kind string, status metav1.ConditionStatus, reason, message string) {
	w.Helper()
	got := meta.FindStatusCondition(w.getWork(name).Status.Conditions, kind)
	if got == nil || got.Status != status || got.Reason != reason || (message != "" && got.Message != message) {
		raw, err := json.Marshal(got)
		w.noError(err)
		w.Errorf("condition %s of %s: got %s, want %s %s %q", kind, name, raw, status, reason, message)
	}
}

func (w *world) eventually(condition string, check func() bool) {
	w.Helper()
	err := wait.PollUntilContextTimeout(w.Context(), 20*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return check(), nil })
	if err != nil {
		w.Fatalf("%s: %v", condition, err)
	}
}
