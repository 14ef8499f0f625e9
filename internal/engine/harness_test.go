package engine_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"path"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

var _ deliver.Engine = (*engine.Engine)(nil)

var (
	configMaps  = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	secrets     = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	namespaces  = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}
	definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
)

// cluster is a member for one test: two namespaces on the shared API server.
type cluster struct {
	t       testing.TB
	cfg     *rest.Config
	objects dynamic.Interface
	ns      string // of the objects
	records string // of the inventory records
}

func newCluster(t testing.TB) *cluster {
	t.Helper()
	plane := localkube.Shared(t)
	return &cluster{
		t: t, cfg: plane.Config, objects: dynamic.NewForConfigOrDie(plane.Config),
		ns: plane.Namespace(t, "engine"), records: plane.Namespace(t, "records"),
	}
}

// engine returns a new Engine, like after a restart of the process. meter may be nil.
func (c *cluster) engine(meter *meter, change ...func(*engine.Options)) *engine.Engine {
	c.t.Helper()
	cfg := rest.CopyConfig(c.cfg)
	if meter != nil {
		cfg.Wrap(meter.wrap)
	}
	opts := engine.Options{Namespace: c.records}
	for _, f := range change {
		f(&opts)
	}
	e, err := engine.New(cfg, opts)
	if err != nil {
		c.t.Fatal(err)
	}
	return e
}

func (c *cluster) get(gvr schema.GroupVersionResource, ns, name string) *unstructured.Unstructured {
	c.t.Helper()
	obj, err := c.objects.Resource(gvr).Namespace(ns).Get(c.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return obj
}

func (c *cluster) create(gvr schema.GroupVersionResource, obj *unstructured.Unstructured) *unstructured.Unstructured {
	c.t.Helper()
	made, err := c.objects.Resource(gvr).Namespace(obj.GetNamespace()).Create(c.t.Context(), obj, metav1.CreateOptions{FieldManager: "another"})
	if err != nil {
		c.t.Fatal(err)
	}
	return made
}

func (c *cluster) patch(gvr schema.GroupVersionResource, name, body string) {
	c.t.Helper()
	_, err := c.objects.Resource(gvr).Namespace(c.ns).Patch(c.t.Context(), name, types.MergePatchType, []byte(body),
		metav1.PatchOptions{FieldManager: "another"})
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) delete(gvr schema.GroupVersionResource, name string) {
	c.t.Helper()
	if err := c.objects.Resource(gvr).Namespace(c.ns).Delete(c.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// listNames lists the objects of the test's namespace that have the engine's ownership label.
func (c *cluster) listNames(gvr schema.GroupVersionResource) []string {
	c.t.Helper()
	list, err := c.objects.Resource(gvr).Namespace(c.ns).List(c.t.Context(), metav1.ListOptions{LabelSelector: kube.LabelReason})
	if err != nil {
		c.t.Fatal(err)
	}
	names := []string{}
	for _, item := range list.Items {
		names = append(names, item.GetName())
	}
	return names
}

func (c *cluster) wantNames(gvr schema.GroupVersionResource, want ...string) {
	c.t.Helper()
	if want == nil {
		want = []string{}
	}
	if diff := cmp.Diff(c.listNames(gvr), want); diff != "" {
		c.t.Errorf("%s with the ownership label (-got +want):\n%s", gvr.Resource, diff)
	}
}

func (c *cluster) wantRecords(want int) {
	c.t.Helper()
	list, err := c.objects.Resource(secrets).Namespace(c.records).List(c.t.Context(), metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	if got := len(list.Items); got != want {
		c.t.Errorf("Secrets of records: got %d, want %d", got, want)
	}
}

func (c *cluster) configMap(name, value string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"name": name, "namespace": c.ns},
		"data":     map[string]any{"key": value},
	}}
}

// bundle returns a bundle of these objects with CorrectDrift. The tests share one API server, so the requestor's name
// contains the test's namespace.
func (c *cluster) bundle(name string, objects ...*unstructured.Unstructured) bundle.Bundle {
	return bundle.Bundle{
		ID:    bundle.ID{RequestorKind: "ClusterSummary", RequestorName: c.ns + "-" + name, Feature: "Resources"},
		Owner: bundle.Owner{Kind: "ClusterProfile", Name: name, Tier: 100},
		Items: []bundle.Item{{
			Objects: objects, Reference: bundle.Reference{Kind: "ConfigMap", Namespace: "default", Name: "manifests", Tier: 100},
		}},
		Options: bundle.Options{CorrectDrift: true},
	}
}

func converge(t testing.TB, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	report, err := e.Converge(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	if report.State != bundle.StateApplied || report.Message != "" || report.LastApplied.IsZero() {
		t.Fatalf("report: got state %s, message %q, last applied %s", report.State, report.Message, report.LastApplied)
	}
	return report
}

func wantConvergeError(t testing.TB, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	report, err := e.Converge(t.Context(), b)
	if err == nil || report.State != bundle.StateFailed || report.Message == "" {
		t.Fatalf("got state %s, message %q, error %v; want a failure", report.State, report.Message, err)
	}
	return report
}

func withdraw(t testing.TB, e *engine.Engine, w bundle.Withdrawal) {
	t.Helper()
	eventually(t, "withdrawn", func() bool {
		done, err := e.Withdraw(t.Context(), w)
		if err != nil {
			t.Fatal(err)
		}
		return done
	})
}

// waitLimit limits every wait. Kubernetes may need half a minute to delete a namespace on a busy machine.
const waitLimit = 2 * time.Minute

// counts is the number of changes in a ChangeSet, by action.
type counts map[bundle.Action]int

func wantChanges(t testing.TB, changes bundle.ChangeSet, want counts) {
	t.Helper()
	got := counts{}
	for _, change := range changes {
		got[change.Action]++
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("changes (-got +want):\n%s\n%v", diff, changes)
	}
}

func eventually(t testing.TB, what string, check func() bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, waitLimit, true, func(context.Context) (bool, error) {
		return check(), nil
	})
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// errCut is the error of a request after the connection was cut.
var errCut = errors.New("the line was cut")

// meter is a transport that records requests, and can fail all requests after a number of requests.
type meter struct {
	mu      sync.Mutex
	seen    []string
	bytes   int // of the response bodies
	cutting bool
	left    int
	// refusals is the number of requests that were not sent since the cut.
	refusals int
	// late cuts the connection after the last request was sent: the server processes it, and its response is lost.
	late bool
	// writes counts only write requests for the cut.
	writes bool
	// before, if it is not nil, is called before each request.
	before func(*http.Request)
}

func (m *meter) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if m.before != nil {
			m.before(r)
		}
		if !m.admit(r) {
			return nil, errCut
		}
		response, err := next.RoundTrip(r)
		if err == nil && m.losesResponse() {
			_ = response.Body.Close()
			return nil, errCut
		}
		if err == nil {
			response.Body = &countedBody{ReadCloser: response.Body, meter: m}
		}
		return response, err
	})
}

func (m *meter) admit(r *http.Request) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cutting {
		if m.left == 0 {
			m.refusals++
			return false
		}
		if !m.writes || r.Method != http.MethodGet {
			m.left--
		}
	}
	m.seen = append(m.seen, r.Method+" "+r.URL.RequestURI())
	return true
}

func (m *meter) losesResponse() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cutting && m.late && m.left == 0
}

// countedBody counts the bytes that are read of a response.
type countedBody struct {
	io.ReadCloser

	meter *meter
}

// Read makes countedBody an io.Reader.
func (b *countedBody) Read(into []byte) (int, error) {
	n, err := b.ReadCloser.Read(into)
	b.meter.mu.Lock()
	defer b.meter.mu.Unlock()
	b.meter.bytes += n
	return n, err
}

// takeBytes returns the number of bytes that were read of responses since the last takeBytes.
func (m *meter) takeBytes() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.bytes
	m.bytes = 0
	return n
}

// endCut ends a cut.
func (m *meter) endCut() { m.mu.Lock(); defer m.mu.Unlock(); m.cutting = false }

func (m *meter) cutAfter(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cutting, m.left, m.refusals = true, n, 0
}

func (m *meter) refused() int { m.mu.Lock(); defer m.mu.Unlock(); return m.refusals }

// take returns the requests since the last take, without requests for discovery.
func (m *meter) take() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, line := range m.seen {
		uri := strings.TrimPrefix(line, "GET ")
		if uri == "/api" || uri == "/apis" || path.Base(path.Dir(uri)) == "apis" {
			continue
		}
		out = append(out, line)
	}
	m.seen = nil
	return out
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
