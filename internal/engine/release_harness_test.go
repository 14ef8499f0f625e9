package engine_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	helm "helm.sh/helm/v4/pkg/release/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/release"
)

var jobs = schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}

// job returns a Job whose Pod ends at once on the simulated node, or is never scheduled.
func (c *cluster) job(name string, ends bool) *unstructured.Unstructured {
	pod := map[string]any{"restartPolicy": "Never", "containers": []any{map[string]any{"name": "main", "image": "example.com/hook:1"}}}
	if !ends {
		pod["nodeSelector"] = map[string]any{"no-such": "node"}
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "batch/v1", "kind": "Job",
		"metadata": map[string]any{"name": name, "namespace": c.ns},
		"spec":     map[string]any{"backoffLimit": int64(0), "template": map[string]any{"spec": pod}},
	}}
}

// wantAllNames is wantNames for all objects of a kind, also without our ownership label.
func (c *cluster) wantAllNames(gvr schema.GroupVersionResource, want ...string) {
	c.t.Helper()
	list, err := c.objects.Resource(gvr).Namespace(c.ns).List(c.t.Context(), metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	var got []string
	for _, item := range list.Items {
		if item.GetName() != "kube-root-ca.crt" && item.GetDeletionTimestamp() == nil {
			got = append(got, item.GetName())
		}
	}
	if !slices.Equal(got, want) {
		c.t.Errorf("%s: got %q, want %q", gvr.Resource, got, want)
	}
}

// withDeadline makes a Job fail after one second.
func withDeadline(job *unstructured.Unstructured) *unstructured.Unstructured {
	if err := unstructured.SetNestedField(job.Object, int64(1), "spec", "activeDeadlineSeconds"); err != nil {
		panic(err)
	}
	return job
}

// asHook makes an object a hook of events, with a weight and delete policies.
func asHook(obj *unstructured.Unstructured, events string, weight int, policies string) *unstructured.Unstructured {
	annotations := map[string]string{helm.HookAnnotation: events, helm.HookWeightAnnotation: fmt.Sprint(weight)}
	if policies != "" {
		annotations[helm.HookDeleteAnnotation] = policies
	}
	obj.SetAnnotations(annotations)
	return obj
}

// chart returns a bundle with CorrectDrift and one Helm release of these objects, and hooks among them.
func (c *cluster) chart(options bundle.ReleaseOptions, objects ...*unstructured.Unstructured) bundle.Bundle {
	b := c.bundle("chart")
	b.ID.Feature = "Helm"
	b.Items = []bundle.Item{c.releaseItem("web", options, objects...)}
	return b
}

func (c *cluster) releaseItem(name string, options bundle.ReleaseOptions, objects ...*unstructured.Unstructured) bundle.Item {
	return bundle.Item{Objects: objects, Release: &bundle.Release{
		Name: name, Namespace: c.ns, ChartName: "chart", ChartVersion: "1.2.3", Options: options,
		Data: bundle.ReleaseData{
			Chart: json.RawMessage(`{"name":"chart","version":"1.2.3","apiVersion":"v2"}`), Values: json.RawMessage(`{"replicas":3}`), Notes: "enjoy",
		},
	}}
}

func (c *cluster) releases() release.Store {
	return release.Store{
		Secrets: kubernetes.NewForConfigOrDie(c.cfg).CoreV1(), Metadata: metadata.NewForConfigOrDie(c.cfg), Clock: clock.RealClock{},
	}
}

// listHistory lists the release records of release web as "revision status".
func (c *cluster) listHistory() []string {
	c.t.Helper()
	entries, err := c.releases().List(c.t.Context(), release.Key{Namespace: c.ns, Name: "web"})
	if err != nil {
		c.t.Fatal(err)
	}
	var all []string
	for _, entry := range entries {
		all = append(all, fmt.Sprintf("%d %s", entry.Revision, entry.Status))
	}
	return all
}

func (c *cluster) wantHistory(want ...string) {
	c.t.Helper()
	if got := c.listHistory(); !slices.Equal(got, want) {
		c.t.Errorf("history: got %q, want %q", got, want)
	}
}

// convergeUntilDone converges until the state of the bundle is applied or failed.
func convergeUntilDone(t testing.TB, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	var report bundle.Report
	eventually(t, "the bundle is applied or failed", func() bool {
		report, _ = e.Converge(t.Context(), b)
		return report.State == bundle.StateApplied || report.State == bundle.StateFailed
	})
	return report
}

func deploy(t testing.TB, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	report := convergeUntilDone(t, e, b)
	if report.State != bundle.StateApplied {
		t.Fatalf("got %s %q, want the state applied", report.State, report.Message)
	}
	return report
}

// listWrites lists the write requests in order as "method resource/name", without release records and inventories.
func (c *cluster) listWrites(m *meter) []string {
	var all []string
	for _, line := range m.take() {
		method, uri, _ := strings.Cut(line, " ")
		path, _, _ := strings.Cut(uri, "?")
		if method == "GET" || strings.Contains(path, "towline-record") || strings.Contains(path, "/namespaces/"+c.records) || strings.Contains(path, "/secrets") {
			continue
		}
		_, name, _ := strings.Cut(path, "/namespaces/"+c.ns+"/")
		all = append(all, method+" "+name)
	}
	return all
}
