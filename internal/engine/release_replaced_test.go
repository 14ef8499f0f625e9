package engine_test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/towline/towline/internal/bundle"
)

func TestRevisionThatIsReplacedWhileAHookRunsIsRecordedAsFailed(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	options := bundle.ReleaseOptions{MaxHistory: 10}
	if _, err := e.Converge(t.Context(), c.chart(options, asHook(c.job("hangs", false), "pre-install", 0, ""))); err != nil {
		t.Fatal(err)
	}
	c.wantHistory("1 pending-install")
	deploy(t, e, c.chart(options, c.configMap("main", "1")))
	c.wantHistory("1 failed", "2 deployed")
}

// Kubernetes deletes a Job with ttlSecondsAfterFinished: 0 before a client can read its result.
func TestHookThatDeletesItselfIsDeletedOnceItsEndIsKnown(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	short := func(job *unstructured.Unstructured) *unstructured.Unstructured {
		if err := unstructured.SetNestedField(job.Object, int64(0), "spec", "ttlSecondsAfterFinished"); err != nil {
			t.Fatal(err)
		}
		return job
	}
	deploy(t, c.engine(nil), c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(short(c.job("ends", true)), "pre-install", 0, "")))
	c.wantAllNames(jobs)

	failed := convergeUntilDone(t, c.engine(nil), c.chart(bundle.ReleaseOptions{}, c.configMap("main", "2"),
		asHook(short(withDeadline(c.job("fails", false))), "pre-upgrade", 0, "")))
	if want := "DeadlineExceeded"; failed.State != bundle.StateFailed || strings.Contains(failed.Message, "deleted before") {
		t.Errorf("got %s %q, want %q", failed.State, failed.Message, want)
	}
}

func TestCleanUpOnFailureDeletesWhatTheUpgradeCreated(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	options := bundle.ReleaseOptions{CleanupOnFail: true}
	deploy(t, e, c.chart(options, c.configMap("main", "1")))
	service := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": "new", "namespace": c.ns},
		"spec": map[string]any{"ports": []any{map[string]any{"port": int64(80)}}},
	}}
	report := convergeUntilDone(t, e, c.chart(options, c.configMap("main", "2"), c.configMap("new", "1"), service,
		asHook(withDeadline(c.job("fails", false)), "post-upgrade", 0, "")))
	if report.State != bundle.StateFailed {
		t.Fatalf("got %s %q", report.State, report.Message)
	}
	c.wantAllNames(configMaps, "main")
	c.wantAllNames(schema.GroupVersionResource{Version: "v1", Resource: "services"})
}
