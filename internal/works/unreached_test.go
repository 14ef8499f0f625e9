package works_test

import (
	"errors"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/works"
)

// objectHealths returns the health of each object in the status of a Work.
func (w *world) objectHealths(name string) []workv1alpha1.ResourceHealth {
	w.Helper()
	var all []workv1alpha1.ResourceHealth
	for _, status := range w.getWork(name).Status.ManifestStatuses {
		all = append(all, status.Health)
	}
	return all
}

func (w *world) wantObjectHealths(name string, want ...workv1alpha1.ResourceHealth) {
	w.Helper()
	if got := w.objectHealths(name); !cmp.Equal(got, want) {
		w.Errorf("healths of %s: got %v, want %v", name, got, want)
	}
}

func TestWorkOfUnreachableCluster(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	for name, host := range map[string]string{
		"as its Cluster says": "", "as the attempt shows": "http://127.0.0.1:1", "as the time shows that it takes": "http://" + silent.Addr().String(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			execute := func(name string) {
				t.Helper()
				executor := w.executor()
				executor.Engine, executor.Limit = nil, time.Second
				at := works.ClusterState{}
				if host != "" {
					at = reachable
					unreached, err := engine.New(&rest.Config{Host: host}, engine.Options{})
					w.noError(err)
					executor.Engine = unreached
				}
				err := executor.Execute(t.Context(), w.getWork(name), at)
				if host == "" {
					w.noError(err)
				} else if err == nil {
					t.Error("no error")
				}
			}
			w.createWork("new", configMap("b", "1"))
			execute("new")
			w.wantCondition("new", "Dispatching", metav1.ConditionTrue, "Dispatching", "")
			w.wantCondition("new", "Applied", metav1.ConditionFalse, "AppliedFailed", "Failed to apply all manifests (0/1): the cluster does not answer")
			w.wantObjectHealths("new", workv1alpha1.ResourceUnknown)

			w.createWork("old", configMap("a", "1"))
			w.noError(w.execute("old", reachable))
			w.wantObjectHealths("old", workv1alpha1.ResourceHealthy)
			before := w.getWork("old").Status.ManifestStatuses[0].Identifier
			execute("old")
			w.wantCondition("old", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "Manifest has been successfully applied")
			w.wantObjectHealths("old", workv1alpha1.ResourceUnknown)
			if diff := cmp.Diff(w.getWork("old").Status.ManifestStatuses[0].Identifier, before); diff != "" {
				t.Errorf("identifier (-got +want):\n%s", diff)
			}
			w.updateWork("old", func(work *workv1alpha1.Work) {
				work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("a", "2"))}
			})
			for range 2 {
				execute("old")
				w.wantCondition("old", "Applied", metav1.ConditionUnknown, "AppliedFailed",
					"Failed to apply all manifests (0/1): the cluster does not answer")
			}
			w.updateWork("new", suspend(true))
			execute("new")
			w.wantCondition("new", "Dispatching", metav1.ConditionFalse, "SuspendDispatching", "")
			w.noError(w.execute("old", reachable))
			w.wantCondition("old", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "")
			w.wantObjectHealths("old", workv1alpha1.ResourceHealthy)
		})
	}
}

// roundTripper is a function that sends requests.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// engineWithErrors returns an engine whose matching requests fail like a broken conversion.
func (w *world) engineWithErrors(isBroken func(*http.Request) bool) *engine.Engine {
	w.Helper()
	cfg := rest.CopyConfig(w.plane.Config)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if isBroken(r) {
				return &http.Response{StatusCode: http.StatusInternalServerError, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
			}
			return next.RoundTrip(r)
		})
	})
	e, err := engine.New(cfg, engine.Options{Namespace: w.records, Hub: "hub", Scope: w.space})
	w.noError(err)
	return e
}

func TestUnreadableObjectDoesNotHideOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("a", "1"), configMap("b", "1"))
	w.noError(w.execute("one", reachable))
	executor := w.executor()
	executor.Engine = w.engineWithErrors(func(r *http.Request) bool {
		return strings.HasSuffix(r.URL.Path, "/configmaps/a") && !strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata")
	})
	if err := executor.Execute(t.Context(), w.getWork("one"), reachable); err == nil {
		t.Error("no error")
	}
	w.wantObjectHealths("one", workv1alpha1.ResourceUnknown, workv1alpha1.ResourceHealthy)
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "")
}

func TestBusyClusterIsNotUnresponsive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("a", "1"), configMap("b", "1"))
	var hanging atomic.Bool
	var applied atomic.Int32
	cfg := rest.CopyConfig(w.plane.Config)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Method != http.MethodPatch {
				return next.RoundTrip(r)
			}
			if hanging.Load() && strings.HasSuffix(r.URL.Path, "/configmaps/b") {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}
			if strings.HasSuffix(r.URL.Path, "/configmaps/c") {
				applied.Add(1)
			}
			return next.RoundTrip(r)
		})
	})
	busy, err := engine.New(cfg, engine.Options{Namespace: w.records, Hub: "hub", Scope: w.space})
	w.noError(err)
	executor := w.executor()
	executor.Engine = busy
	w.noError(executor.Execute(t.Context(), w.getWork("one"), reachable))
	w.updateWork("one", func(work *workv1alpha1.Work) {
		work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("a", "2")), w.manifest(configMap("b", "2")), w.manifest(configMap("c", "2"))}
	})
	hanging.Store(true)
	executor.Limit = 10 * time.Second
	if err := executor.Execute(t.Context(), w.getWork("one"), reachable); !errors.Is(err, engine.ErrTimeUp) || errors.Is(err, works.ErrUnresponsive) {
		t.Errorf("got %v", err)
	}
	w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", "Failed to apply all manifests (2/3): "+engine.ErrTimeUp.Error())
	w.wantObjectHealths("one", workv1alpha1.ResourceHealthy, workv1alpha1.ResourceHealthy, workv1alpha1.ResourceHealthy)
	hanging.Store(false)
	w.noError(executor.Execute(t.Context(), w.getWork("one"), reachable))
	if w.value("a") != "2" || w.value("b") != "2" || applied.Load() != 1 {
		t.Errorf("got a=%q b=%q, c was applied %d times, want once", w.value("a"), w.value("b"), applied.Load())
	}
}

func TestLargeStatusIsOmitted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	group := w.createKind(t)
	thing := func(name string) string {
		return "{apiVersion: OBJECTS.example.com/v1, kind: Thing, metadata: {name: " + name + ", namespace: OBJECTS}}"
	}
	w.createWork("one", thing("a"), thing("b"))
	w.eventually("applied", func() bool { return w.execute("one", reachable) == nil })
	for name, size := range map[string]int{"a": 300 << 10, "b": 10} {
		obj := w.getThing(group, name)
		w.noError(unstructured.SetNestedField(obj.Object, strings.Repeat("x", size), "status", "text"))
		w.noError(w.Update(t.Context(), obj))
	}
	w.noError(w.execute("one", reachable))
	statuses := w.getWork("one").Status.ManifestStatuses
	if statuses[0].Status != nil || statuses[1].Status == nil || statuses[0].Health != workv1alpha1.ResourceHealthy {
		t.Errorf("got %v", statuses)
	}
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful",
		"Manifest has been successfully applied; 1 object statuses are omitted, because the Work would be too large")
}

func TestStaleWorkIsReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("a", "1"))
	old := w.getWork("one")
	w.noError(w.execute("one", reachable))
	old.Status = workv1alpha1.WorkStatus{}
	if err := w.executor().Execute(t.Context(), old, reachable); !errors.Is(err, works.ErrStale) {
		t.Errorf("got %v", err)
	}
}
