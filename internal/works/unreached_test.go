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

// healths returns the healths that a Work reports.
func (w *world) healths(name string) []workv1alpha1.ResourceHealth {
	w.Helper()
	var all []workv1alpha1.ResourceHealth
	for _, status := range w.get(name).Status.ManifestStatuses {
		all = append(all, status.Health)
	}
	return all
}

func (w *world) wantHealths(name string, want ...workv1alpha1.ResourceHealth) {
	w.Helper()
	if got := w.healths(name); !cmp.Equal(got, want) {
		w.Errorf("healths of %s: got %v, want %v", name, got, want)
	}
}

func TestWorkOfUnreachedCluster(t *testing.T) {
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
				at := works.Circumstances{}
				if host != "" {
					at = there
					unreached, err := engine.New(&rest.Config{Host: host}, engine.Options{})
					w.must(err)
					executor.Engine = unreached
				}
				_, err := executor.Execute(t.Context(), w.get(name), at)
				if host == "" {
					w.must(err)
				} else if err == nil {
					t.Error("no error")
				}
			}
			w.work("new", configMap("b", "1"))
			execute("new")
			w.wantCondition("new", "Dispatching", metav1.ConditionTrue, "Dispatching", "")
			w.wantCondition("new", "Applied", metav1.ConditionFalse, "AppliedFailed", "Failed to apply all manifests (0/1): the cluster does not answer")
			w.wantHealths("new", workv1alpha1.ResourceUnknown)

			w.work("old", configMap("a", "1"))
			w.must(w.execute("old", there))
			w.wantHealths("old", workv1alpha1.ResourceHealthy)
			before := w.get("old").Status.ManifestStatuses[0].Identifier
			execute("old")
			w.wantCondition("old", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "Manifest has been successfully applied")
			w.wantHealths("old", workv1alpha1.ResourceUnknown)
			if diff := cmp.Diff(w.get("old").Status.ManifestStatuses[0].Identifier, before); diff != "" {
				t.Errorf("identifier (-got +want):\n%s", diff)
			}
			w.change("old", func(work *workv1alpha1.Work) {
				work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("a", "2"))}
			})
			for range 2 {
				execute("old")
				w.wantCondition("old", "Applied", metav1.ConditionUnknown, "AppliedFailed",
					"Failed to apply all manifests (0/1): the cluster does not answer")
			}
			w.change("new", suspend(true))
			execute("new")
			w.wantCondition("new", "Dispatching", metav1.ConditionFalse, "SuspendDispatching", "")
			w.must(w.execute("old", there))
			w.wantCondition("old", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "")
			w.wantHealths("old", workv1alpha1.ResourceHealthy)
		})
	}
}

// roundTripper is a function that carries requests.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// breaking returns an engine for which those requests fail as a broken conversion fails.
func (w *world) breaking(broken func(*http.Request) bool) *engine.Engine {
	w.Helper()
	cfg := rest.CopyConfig(w.plane.Config)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if broken(r) {
				return &http.Response{StatusCode: http.StatusInternalServerError, Header: http.Header{}, Body: http.NoBody, Request: r}, nil
			}
			return next.RoundTrip(r)
		})
	})
	e, err := engine.New(cfg, engine.Options{Namespace: w.records, Hub: "hub", Scope: w.space})
	w.must(err)
	return e
}

func TestOneObjectThatCannotBeReadHidesNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"), configMap("b", "1"))
	w.must(w.execute("one", there))
	executor := w.executor()
	executor.Engine = w.breaking(func(r *http.Request) bool {
		return strings.HasSuffix(r.URL.Path, "/configmaps/a") && !strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata")
	})
	if _, err := executor.Execute(t.Context(), w.get("one"), there); err == nil {
		t.Error("no error")
	}
	w.wantHealths("one", workv1alpha1.ResourceUnknown, workv1alpha1.ResourceHealthy)
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful", "")
}

func TestBusyClusterIsNotSilent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"), configMap("b", "1"))
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
	w.must(err)
	executor := w.executor()
	executor.Engine = busy
	_, err = executor.Execute(t.Context(), w.get("one"), there)
	w.must(err)
	w.change("one", func(work *workv1alpha1.Work) {
		work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("a", "2")), w.manifest(configMap("b", "2")), w.manifest(configMap("c", "2"))}
	})
	hanging.Store(true)
	executor.Limit = 10 * time.Second
	if _, err := executor.Execute(t.Context(), w.get("one"), there); !errors.Is(err, engine.ErrTimeUp) || errors.Is(err, works.ErrSilent) {
		t.Errorf("got %v", err)
	}
	w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", "Failed to apply all manifests (2/3): "+engine.ErrTimeUp.Error())
	w.wantHealths("one", workv1alpha1.ResourceHealthy, workv1alpha1.ResourceHealthy, workv1alpha1.ResourceHealthy)
	hanging.Store(false)
	_, err = executor.Execute(t.Context(), w.get("one"), there)
	w.must(err)
	if w.value("a") != "2" || w.value("b") != "2" || applied.Load() != 1 {
		t.Errorf("got a=%q b=%q, c was applied %d times, want once", w.value("a"), w.value("b"), applied.Load())
	}
}

func TestBigStatusHidesNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	group := w.define(t)
	thing := func(name string) string {
		return "{apiVersion: OBJECTS.example.com/v1, kind: Thing, metadata: {name: " + name + ", namespace: OBJECTS}}"
	}
	w.work("one", thing("a"), thing("b"))
	w.eventually("applied", func() bool { return w.execute("one", there) == nil })
	for name, size := range map[string]int{"a": 300 << 10, "b": 10} {
		obj := w.thing(group, name)
		w.must(unstructured.SetNestedField(obj.Object, strings.Repeat("x", size), "status", "text"))
		w.must(w.Update(t.Context(), obj))
	}
	w.must(w.execute("one", there))
	statuses := w.get("one").Status.ManifestStatuses
	if statuses[0].Status != nil || statuses[1].Status == nil || statuses[0].Health != workv1alpha1.ResourceHealthy {
		t.Errorf("got %v", statuses)
	}
	w.wantCondition("one", "Applied", metav1.ConditionTrue, "AppliedSuccessful",
		"Manifest has been successfully applied; 1 of the objects' statuses are left out, they would make the Work too big")
}

func TestStaleWorkIsSaidToBeStale(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"))
	old := w.get("one")
	w.must(w.execute("one", there))
	old.Status = workv1alpha1.WorkStatus{}
	again, err := w.executor().Execute(t.Context(), old, there)
	if !errors.Is(err, works.ErrStale) || again != 0 {
		t.Errorf("got %v, %v", again, err)
	}
}
