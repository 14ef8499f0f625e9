package works_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/fleet"
	hubworks "github.com/towline/towline/internal/hub/works"
	"github.com/towline/towline/internal/works"
)

// requestLog lists the requests that engines send to the member.
type requestLog struct {
	mu   sync.Mutex // guards sent
	sent []string
}

// wrap records the requests to next.
func (l *requestLog) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		content := "whole "
		if strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") {
			content = "metadata "
		}
		l.mu.Lock()
		l.sent = append(l.sent, r.Method+" "+content+r.URL.RequestURI())
		l.mu.Unlock()
		return next.RoundTrip(r)
	})
}

// take returns the requests since the last call about ConfigMaps of a namespace, without watches: "GET metadata /m-07".
func (l *requestLog) take(namespace string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for _, line := range l.sent {
		what, uri, found := strings.Cut(line, "/api/v1/namespaces/"+namespace+"/configmaps")
		if found && !strings.Contains(uri, "watch=") {
			path, _, _ := strings.Cut(uri, "?")
			all = append(all, what+path)
		}
	}
	l.sent = nil
	return all
}

// roundTripper is a function that sends requests.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// countedEngine counts how often the objects of a Work were observed: that is the last thing that a reconcile does on
// the member.
type countedEngine struct {
	works.Engine
	observed *atomic.Int32
}

func (e countedEngine) Observe(ctx context.Context, id bundle.ID) ([]engine.Observation, error) {
	defer e.observed.Add(1)
	return e.Engine.Observe(ctx, id)
}

// TestEventOfOneObjectReadsOneObject changes one of many objects of a Work on the member. The watch of the engine
// reports that, and the Work is reconciled.
func TestEventOfOneObjectReadsOneObject(t *testing.T) {
	t.Parallel()
	const manifests = 40
	var observed atomic.Int32
	w := newTestEnv(t, clusterv1alpha1.Push, func(c *hubworks.Controller) {
		engines := c.Engines
		c.Engines = func(ctx context.Context, m fleet.Member) (works.Engine, error) {
			e, err := engines(ctx, m)
			return countedEngine{e, &observed}, err
		}
	})
	work := &workv1alpha1.Work{}
	work.Namespace, work.Name = fleet.ExecutionSpace(w.cluster.Name), "one"
	for i := range manifests {
		raw := fmt.Appendf(nil, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"m-%02d","namespace":%q},"data":{"key":"one"}}`, i, w.objects)
		work.Spec.Workload.Manifests = append(work.Spec.Workload.Manifests, workv1alpha1.Manifest{RawExtension: runtime.RawExtension{Raw: raw}})
	}
	w.must(w.Create(t.Context(), work))
	w.setReady(metav1.ConditionTrue)
	w.eventually("applied", func() bool { return w.isApplied("one") })
	edit := func(name string) {
		t.Helper()
		before := observed.Load()
		cm := &corev1.ConfigMap{}
		cm.Namespace, cm.Name = w.objects, name
		w.must(w.Patch(t.Context(), cm, client.RawPatch("application/merge-patch+json", []byte(`{"data":{"key":"edited"}}`)), client.FieldOwner("somebody")))
		w.eventually("corrected and observed", func() bool {
			w.must(w.Get(t.Context(), client.ObjectKeyFromObject(cm), cm))
			return cm.Data["key"] == "one" && observed.Load() > before
		})
	}
	edit("m-03") // after this the engine watches the objects and knows their state
	w.requests.take(w.objects)
	edit("m-07")
	requests := w.requests.take(w.objects)
	var read []string
	for _, request := range requests {
		name, isWhole := strings.CutPrefix(request, "GET whole ")
		if isWhole || !strings.HasPrefix(request, "GET metadata") && request != "PATCH metadata /m-07" {
			read = append(read, name)
		}
	}
	// The correction of m-03 may be observed late.
	others := slices.DeleteFunc(slices.Clone(read), func(name string) bool { return name == "/m-03" || name == "/m-07" })
	if !slices.Contains(read, "/m-07") || len(others) > 0 || len(requests) > manifests/2 {
		t.Errorf("the objects %q were read; want m-07 only; requests:\n%s", read, strings.Join(requests, "\n"))
	}
}
