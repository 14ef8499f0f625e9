package engine_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/release/common"
	helm "helm.sh/helm/v4/pkg/release/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/release"
)

func TestReleaseRunsHooksInOrder(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	line := &meter{}
	e := c.engine(line)
	objects := func(value string) []*unstructured.Unstructured {
		return []*unstructured.Unstructured{
			c.configMap("main", value),
			asHook(c.job("second", true), "pre-install,pre-upgrade", 1, ""),
			asHook(c.configMap("first", "1"), "pre-install", -5, "hook-succeeded"),
			asHook(c.job("last", true), "post-install,post-upgrade", 0, "before-hook-creation,hook-succeeded"),
			asHook(c.job("test", true), "test", 0, ""),
			asHook(c.job("bye", true), "pre-delete", 0, ""),
		}
	}
	b := c.chart(bundle.ReleaseOptions{MaxHistory: 2}, objects("1")...)
	deploy(t, e, b)
	want := []string{
		"POST configmaps", "DELETE jobs/second", "POST jobs", "DELETE configmaps/first",
		"PATCH configmaps/main", "DELETE jobs/last", "POST jobs", "DELETE jobs/last",
	}
	if got := c.listWrites(line); !slices.Equal(got, want) {
		t.Errorf("requests: got %q, want %q", got, want)
	}
	c.wantHistory("1 deployed")
	c.wantAllNames(jobs, "second")
	record, _, err := c.releases().Get(t.Context(), release.Key{Namespace: c.ns, Name: "web"}, 1)
	if err != nil {
		t.Fatal(err)
	}
	if record.Info.Notes != "enjoy" || record.Config["replicas"] != float64(3) || record.Chart.Metadata.Version != "1.2.3" || len(record.Hooks) != 5 ||
		!strings.Contains(record.Manifest, "name: main") || record.Hooks[0].LastRun.Phase != helm.HookPhaseSucceeded {
		t.Errorf("record: %+v, manifest %s", record.Info, record.Manifest)
	}

	ran := c.get(jobs, c.ns, "second").GetUID()
	c.patch(configMaps, "main", `{"data":{"key":"changed"}}`)
	deploy(t, c.engine(nil), b)
	if c.value("main") != "1" || c.get(jobs, c.ns, "second").GetUID() != ran {
		t.Errorf("after drift: value %q, or a hook was run again", c.value("main"))
	}
	c.wantHistory("1 deployed")

	line.take()
	deploy(t, e, c.chart(bundle.ReleaseOptions{MaxHistory: 2}, objects("2")...))
	want = []string{
		"DELETE jobs/second", "POST jobs", "PATCH configmaps/main", "DELETE jobs/last", "POST jobs", "DELETE jobs/last",
	}
	if got := c.listWrites(line); !slices.Equal(got, want) {
		t.Errorf("requests of the upgrade: got %q, want %q", got, want)
	}
	c.wantHistory("1 superseded", "2 deployed")
	deploy(t, e, c.chart(bundle.ReleaseOptions{MaxHistory: 2, RunTests: true}, objects("3")...))
	c.wantHistory("2 superseded", "3 deployed")
	c.wantAllNames(jobs, "second", "test")

	line.take()
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	want = []string{"DELETE jobs/bye", "POST jobs", "DELETE configmaps/main"}
	if got := c.listWrites(line); !slices.Equal(got, want) {
		t.Errorf("requests of the uninstallation: got %q, want %q", got, want)
	}
	c.wantHistory()
	c.wantRecords(0)
}

func TestOrphaningWithdrawalKeepsTheRelease(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("bye", true), "pre-delete", 0, ""))
	e := c.engine(nil)
	deploy(t, e, b)
	withdraw(t, e, bundle.Withdrawal{ID: b.ID, Orphan: true})
	c.wantHistory("1 deployed")
	c.wantAllNames(configMaps, "main")
	c.wantAllNames(jobs)
}

func TestFailedHookFailsTheRevision(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	broken := c.chart(bundle.ReleaseOptions{MaxHistory: 10}, c.configMap("main", "1"),
		asHook(withDeadline(c.job("migrate", false)), "pre-install,pre-upgrade", 0, ""))
	report := convergeUntilDone(t, e, broken)
	want := fmt.Sprintf("helm release %s/web: install of revision 1 failed: pre-install hook Job batch %s/migrate failed: ", c.ns, c.ns)
	if report.State != bundle.StateFailed || !strings.HasPrefix(report.Message, want) {
		t.Fatalf("got %s %q, want %q", report.State, report.Message, want)
	}
	c.wantAllNames(configMaps)
	c.wantHistory("1 failed")
	// The engine retries the hook after a pause.
	first := c.get(jobs, c.ns, "migrate").GetUID()
	eventually(t, "tried again", func() bool {
		_, _ = e.Converge(t.Context(), broken)
		return c.get(jobs, c.ns, "migrate") != nil && c.get(jobs, c.ns, "migrate").GetUID() != first
	})
	if history := c.listHistory(); history[0] != "1 failed" || !strings.HasPrefix(history[1], "2 ") {
		t.Errorf("history: got %q", history)
	}
	deploy(t, e, c.chart(bundle.ReleaseOptions{MaxHistory: 10}, c.configMap("main", "1")))
	if history := c.listHistory(); !strings.HasSuffix(history[len(history)-1], " deployed") {
		t.Errorf("history: got %q", history)
	}
}

func TestHangingHookBlocksNothingAndTimesOut(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.chart(bundle.ReleaseOptions{Timeout: 3 * time.Second}, c.configMap("main", "1"), asHook(c.job("hangs", false), "pre-install", 0, ""))
	report, err := e.Converge(t.Context(), b)
	if err != nil || report.State != bundle.StateApplying || !strings.Contains(report.Message, "waiting for pre-install hook Job batch "+c.ns+"/hangs") {
		t.Fatalf("got %s %q, %v", report.State, report.Message, err)
	}
	converge(t, e, c.bundle("other", c.configMap("other", "1")))
	if report := convergeUntilDone(t, e, b); !strings.Contains(report.Message, "it did not end within 3s") {
		t.Errorf("got %s %q", report.State, report.Message)
	}
}

func TestEachHookRunsOncePerRevisionWhereverTheEngineDies(t *testing.T) {
	t.Parallel()
	for name, late := range map[string]bool{"before a request": false, "after a request": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"),
				asHook(c.job("one", true), "pre-install", 1, ""), asHook(c.job("two", true), "post-install", 0, ""))
			n := 1
			for c.interruptRelease(b, &meter{late: late, writes: true}, n) {
				n++
			}
			if n < 12 {
				t.Errorf("the release was interrupted only %d times", n-1)
			}
		})
	}
}

// interruptRelease installs and uninstalls b with an engine whose connection is cut after n requests. It returns
// whether the connection was cut.
func (c *cluster) interruptRelease(b bundle.Bundle, line *meter, n int) bool {
	c.t.Helper()
	line.cutAfter(n)
	e := c.engine(line)
	eventually(c.t, "cut or deployed", func() bool {
		report, err := e.Converge(c.t.Context(), b)
		return err != nil || report.State == bundle.StateApplied
	})
	isCut := func() bool { line.mu.Lock(); defer line.mu.Unlock(); return line.left == 0 }()
	uids := map[string]bool{}
	existing := func() {
		list, err := c.objects.Resource(jobs).Namespace(c.ns).List(c.t.Context(), metav1.ListOptions{})
		if err != nil {
			c.t.Fatal(err)
		}
		for _, job := range list.Items {
			uids[job.GetName()+" "+string(job.GetUID())] = true
		}
	}
	existing()
	deploy(c.t, c.engine(nil), b)
	existing()
	if len(uids) != 2 {
		c.t.Errorf("cut after %d requests: hooks were run as %v", n, uids)
	}
	if history := c.listHistory(); len(history) != 1 || !strings.HasSuffix(history[0], common.StatusDeployed.String()) {
		c.t.Errorf("cut after %d requests: history %q", n, history)
	}
	withdraw(c.t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	for _, name := range []string{"one", "two"} {
		err := c.objects.Resource(jobs).Namespace(c.ns).Delete(c.t.Context(), name,
			metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)})
		if err != nil && !apierrors.IsNotFound(err) {
			c.t.Fatal(err)
		}
	}
	return isCut && !c.t.Failed()
}

func TestDroppedReleaseIsUninstalledWithItsHooks(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	line := &meter{}
	e := c.engine(line)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("bye", true), "pre-delete", 0, "hook-succeeded"),
		asHook(c.configMap("after", "1"), "post-delete", 0, ""))
	other := c.releaseItem("other", bundle.ReleaseOptions{}, c.configMap("stays", "1"))
	b.Items = append(b.Items, other)
	deploy(t, e, b)
	line.take()
	b.Items = b.Items[1:]
	deploy(t, e, b)
	want := []string{"POST jobs", "DELETE jobs/bye", "DELETE configmaps/main", "DELETE configmaps/after", "POST configmaps"}
	if got := c.listWrites(line); !slices.Equal(got, want) {
		t.Errorf("requests: got %q, want %q", got, want)
	}
	c.wantHistory()
	c.wantAllNames(configMaps, "after", "stays")
}

func TestAtomicUpgradeRollsBack(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	options := bundle.ReleaseOptions{Atomic: true, MaxHistory: 5}
	deploy(t, e, c.chart(options, c.configMap("main", "1"), c.configMap("old", "1")))
	report := convergeUntilDone(t, e, c.chart(options, c.configMap("main", "2"), c.configMap("new", "1"),
		asHook(withDeadline(c.job("check", false)), "post-upgrade", 0, "before-hook-creation,hook-failed")))
	if report.State != bundle.StateFailed || !strings.HasSuffix(report.Message, "; rolled back to revision 1") {
		t.Fatalf("got %s %q", report.State, report.Message)
	}
	if c.value("main") != "1" {
		t.Errorf("main is %q", c.value("main"))
	}
	c.wantAllNames(configMaps, "main", "old")
	c.wantAllNames(jobs)
	c.wantHistory("1 superseded", "2 failed", "3 deployed")
	deploy(t, e, c.chart(options, c.configMap("main", "3")))
	c.wantAllNames(configMaps, "main")
	c.wantHistory("1 superseded", "2 failed", "3 superseded", "4 deployed")
}

// TestPartialRollbackIsNotDeployed checks that a rollback fails if an object cannot be rolled back, also if the bundle
// tolerates failures of objects.
func TestPartialRollbackIsNotDeployed(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	chart := func(objects ...*unstructured.Unstructured) bundle.Bundle {
		b := c.chart(bundle.ReleaseOptions{Atomic: true, MaxHistory: 5}, objects...)
		b.Options.ContinueOnError = true
		return b
	}
	deploy(t, e, chart(c.configMap("frozen", "1"), c.configMap("main", "1")))
	frozen := c.configMap("frozen", "2")
	frozen.Object["immutable"] = true
	report := convergeUntilDone(t, e, chart(frozen, c.configMap("main", "2"), asHook(withDeadline(c.job("check", false)), "post-upgrade", 0, "")))
	if report.State != bundle.StateFailed || !strings.Contains(report.Message, "; the rollback failed: ConfigMap "+c.ns+"/frozen: ") {
		t.Errorf("got %s %q", report.State, report.Message)
	}
	if c.value("main") != "1" {
		t.Errorf("main is %q", c.value("main"))
	}
	c.wantHistory("1 deployed", "2 failed", "3 failed")
}

func TestAtomicInstallationIsUndone(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	report := convergeUntilDone(t, e, c.chart(bundle.ReleaseOptions{Atomic: true}, c.configMap("main", "1"), asHook(withDeadline(c.job("check", false)), "post-install", 0, "")))
	if report.State != bundle.StateFailed {
		t.Fatalf("got %s %q", report.State, report.Message)
	}
	c.wantAllNames(configMaps)
	c.wantHistory()
}

func TestWaitForObjects(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	claim := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": map[string]any{"name": "never-bound", "namespace": c.ns},
		"spec": map[string]any{"accessModes": []any{"ReadWriteOnce"}, "resources": map[string]any{"requests": map[string]any{"storage": "1Gi"}}},
	}}
	b := c.chart(bundle.ReleaseOptions{Wait: true, WaitForJobs: true, Timeout: 30 * time.Second}, c.configMap("main", "1"), c.job("work", true))
	deploy(t, e, b)
	if phase, _, _ := unstructured.NestedInt64(c.get(jobs, c.ns, "work").Object, "status", "succeeded"); phase != 1 {
		t.Errorf("the engine did not wait for the Job")
	}
	b = c.chart(bundle.ReleaseOptions{Wait: true, Timeout: 2 * time.Second}, c.configMap("main", "1"), claim)
	if report := convergeUntilDone(t, e, b); !strings.Contains(report.Message, "not ready within 2s: PersistentVolumeClaim "+c.ns+"/never-bound: ") {
		t.Errorf("got %s %q", report.State, report.Message)
	}
}
