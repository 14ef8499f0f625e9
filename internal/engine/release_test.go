package engine_test

import (
	"encoding/json"
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
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/release"
)

var jobs = schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}

// job returns a Job whose pod ends at once on the simulated node, or is never scheduled.
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

// wantAll is wantNames for all objects of a kind, those without our marks included.
func (c *cluster) wantAll(gvr schema.GroupVersionResource, want ...string) {
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

// fails makes a Job that does not end fail after a second.
func fails(job *unstructured.Unstructured) *unstructured.Unstructured {
	if err := unstructured.SetNestedField(job.Object, int64(1), "spec", "activeDeadlineSeconds"); err != nil {
		panic(err)
	}
	return job
}

// hook makes an object a hook: of events, with a weight and delete policies.
func asHook(obj *unstructured.Unstructured, events string, weight int, policies string) *unstructured.Unstructured {
	annotations := map[string]string{helm.HookAnnotation: events, helm.HookWeightAnnotation: fmt.Sprint(weight)}
	if policies != "" {
		annotations[helm.HookDeleteAnnotation] = policies
	}
	obj.SetAnnotations(annotations)
	return obj
}

// chart returns a healing bundle with one Helm release of these objects, and hooks among them.
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

// history lists the recorded revisions of release web as "revision status".
func (c *cluster) history() []string {
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
	if got := c.history(); !slices.Equal(got, want) {
		c.t.Errorf("history: got %q, want %q", got, want)
	}
}

// settle converges until the bundle is applied or has failed.
func settle(t testing.TB, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	var report bundle.Report
	eventually(t, "settled", func() bool {
		report, _ = e.Converge(t.Context(), b)
		return report.State == bundle.StateApplied || report.State == bundle.StateFailed
	})
	return report
}

func deploy(t testing.TB, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	report := settle(t, e, b)
	if report.State != bundle.StateApplied {
		t.Fatalf("got %s %q, want it to be applied", report.State, report.Message)
	}
	return report
}

// written lists the objects that requests have written or deleted, in order, without release records and inventories.
func (c *cluster) written(m *meter) []string {
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
	if got := c.written(line); !slices.Equal(got, want) {
		t.Errorf("requests: got %q, want %q", got, want)
	}
	c.wantHistory("1 deployed")
	c.wantAll(jobs, "second")
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
	if got := c.written(line); !slices.Equal(got, want) {
		t.Errorf("requests of the upgrade: got %q, want %q", got, want)
	}
	c.wantHistory("1 superseded", "2 deployed")
	deploy(t, e, c.chart(bundle.ReleaseOptions{MaxHistory: 2, RunTests: true}, objects("3")...))
	c.wantHistory("2 superseded", "3 deployed")
	c.wantAll(jobs, "second", "test")

	line.take()
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	want = []string{"DELETE jobs/bye", "POST jobs", "DELETE configmaps/main"}
	if got := c.written(line); !slices.Equal(got, want) {
		t.Errorf("requests of the uninstallation: got %q, want %q", got, want)
	}
	c.wantHistory()
	c.wantRecords(0)
}

func TestWithdrawalThatLeavesObjectsLeavesTheRelease(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("bye", true), "pre-delete", 0, ""))
	e := c.engine(nil)
	deploy(t, e, b)
	withdraw(t, e, bundle.Withdrawal{ID: b.ID, Leave: true})
	c.wantHistory("1 deployed")
	c.wantAll(configMaps, "main")
	c.wantAll(jobs)
}

func TestFailedHookFailsTheRevision(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	broken := c.chart(bundle.ReleaseOptions{MaxHistory: 10}, c.configMap("main", "1"),
		asHook(fails(c.job("migrate", false)), "pre-install,pre-upgrade", 0, ""))
	report := settle(t, e, broken)
	want := fmt.Sprintf("helm release %s/web: install of revision 1 failed: pre-install hook Job batch %s/migrate failed: ", c.ns, c.ns)
	if report.State != bundle.StateFailed || !strings.HasPrefix(report.Message, want) {
		t.Fatalf("got %s %q, want %q", report.State, report.Message, want)
	}
	c.wantAll(configMaps)
	c.wantHistory("1 failed")
	// It is not tried again at once, but after a pause.
	first := c.get(jobs, c.ns, "migrate").GetUID()
	eventually(t, "tried again", func() bool {
		_, _ = e.Converge(t.Context(), broken)
		return c.get(jobs, c.ns, "migrate") != nil && c.get(jobs, c.ns, "migrate").GetUID() != first
	})
	if history := c.history(); history[0] != "1 failed" || !strings.HasPrefix(history[1], "2 ") {
		t.Errorf("history: got %q", history)
	}
	deploy(t, e, c.chart(bundle.ReleaseOptions{MaxHistory: 10}, c.configMap("main", "1")))
	if history := c.history(); !strings.HasSuffix(history[len(history)-1], " deployed") {
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
	if report := settle(t, e, b); !strings.Contains(report.Message, "it did not end within 3s") {
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
			for c.cutRelease(b, &meter{late: late, writes: true}, n) {
				n++
			}
			if n < 12 {
				t.Errorf("it was cut only %d times", n-1)
			}
		})
	}
}

// cutRelease installs and uninstalls b, cutting the line after n requests, and returns whether it was cut.
func (c *cluster) cutRelease(b bundle.Bundle, line *meter, n int) bool {
	c.t.Helper()
	line.cutAfter(n)
	e := c.engine(line)
	eventually(c.t, "cut or deployed", func() bool {
		report, err := e.Converge(c.t.Context(), b)
		return err != nil || report.State == bundle.StateApplied
	})
	isCut := func() bool { line.mu.Lock(); defer line.mu.Unlock(); return line.left == 0 }()
	uids := map[string]bool{}
	seen := func() {
		list, err := c.objects.Resource(jobs).Namespace(c.ns).List(c.t.Context(), metav1.ListOptions{})
		if err != nil {
			c.t.Fatal(err)
		}
		for _, job := range list.Items {
			uids[job.GetName()+" "+string(job.GetUID())] = true
		}
	}
	seen()
	deploy(c.t, c.engine(nil), b)
	seen()
	if len(uids) != 2 {
		c.t.Errorf("cut after %d requests: hooks were run as %v", n, uids)
	}
	if history := c.history(); len(history) != 1 || !strings.HasSuffix(history[0], common.StatusDeployed.String()) {
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
	if got := c.written(line); !slices.Equal(got, want) {
		t.Errorf("requests: got %q, want %q", got, want)
	}
	c.wantHistory()
	c.wantAll(configMaps, "after", "stays")
}

func TestAtomicUpgradeRollsBack(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	options := bundle.ReleaseOptions{Atomic: true, MaxHistory: 5}
	deploy(t, e, c.chart(options, c.configMap("main", "1"), c.configMap("old", "1")))
	report := settle(t, e, c.chart(options, c.configMap("main", "2"), c.configMap("new", "1"),
		asHook(fails(c.job("check", false)), "post-upgrade", 0, "before-hook-creation,hook-failed")))
	if report.State != bundle.StateFailed || !strings.HasSuffix(report.Message, "; rolled back to revision 1") {
		t.Fatalf("got %s %q", report.State, report.Message)
	}
	if c.value("main") != "1" {
		t.Errorf("main is %q", c.value("main"))
	}
	c.wantAll(configMaps, "main", "old")
	c.wantAll(jobs)
	c.wantHistory("1 superseded", "2 failed", "3 deployed")
	deploy(t, e, c.chart(options, c.configMap("main", "3")))
	c.wantAll(configMaps, "main")
	c.wantHistory("1 superseded", "2 failed", "3 superseded", "4 deployed")
}

func TestAtomicInstallationIsUndone(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	report := settle(t, e, c.chart(bundle.ReleaseOptions{Atomic: true}, c.configMap("main", "1"), asHook(fails(c.job("check", false)), "post-install", 0, "")))
	if report.State != bundle.StateFailed {
		t.Fatalf("got %s %q", report.State, report.Message)
	}
	c.wantAll(configMaps)
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
	b := c.chart(bundle.ReleaseOptions{Wait: true, WaitForJobs: true, Timeout: 2 * time.Second}, c.configMap("main", "1"), c.job("work", true))
	deploy(t, e, b)
	if phase, _, _ := unstructured.NestedInt64(c.get(jobs, c.ns, "work").Object, "status", "succeeded"); phase != 1 {
		t.Errorf("the Job was not waited for")
	}
	b = c.chart(bundle.ReleaseOptions{Wait: true, Timeout: 2 * time.Second}, c.configMap("main", "1"), claim)
	if report := settle(t, e, b); !strings.Contains(report.Message, "not ready within 2s: PersistentVolumeClaim "+c.ns+"/never-bound: ") {
		t.Errorf("got %s %q", report.State, report.Message)
	}
}

func TestReleaseRecordsAreHealed(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.heal(t, nil)
	b := c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "1"), asHook(c.job("once", true), "pre-install,pre-upgrade", 0, ""))
	deploy(t, h.Engine, b)
	ran := c.get(jobs, c.ns, "once").GetUID()

	// A person runs `helm uninstall`.
	c.delete(configMaps, "main")
	c.delete(secrets, release.SecretName("web", 1))
	eventually(t, "the release is back", func() bool { return c.value("main") == "1" && slices.Equal(c.history(), []string{"1 deployed"}) })

	// A person runs `helm upgrade`.
	key := release.Key{Namespace: c.ns, Name: "web"}
	theirs, _, err := c.releases().Get(t.Context(), key, 1)
	if err != nil {
		t.Fatal(err)
	}
	theirs.Version = 2
	if _, err := c.releases().Put(t.Context(), theirs); err != nil {
		t.Fatal(err)
	}
	theirs.Version, theirs.Info.Status = 1, common.StatusSuperseded
	if _, err := c.releases().Put(t.Context(), theirs); err != nil {
		t.Fatal(err)
	}
	c.patch(configMaps, "main", `{"data":{"key":"theirs"}}`)
	eventually(t, "our revision is the last one", func() bool {
		return c.value("main") == "1" && slices.Equal(c.history(), []string{"1 superseded", "2 superseded", "3 deployed"})
	})
	if c.get(jobs, c.ns, "once").GetUID() != ran {
		t.Error("healing ran a hook")
	}
}

func TestRecordsAreNotHealedWhileHelmWorks(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.heal(t, nil)
	b := c.chart(bundle.ReleaseOptions{MaxHistory: 2}, c.configMap("main", "1"))
	deploy(t, h.Engine, b)
	// A person runs `helm upgrade` with a hook that takes its time.
	theirs, _, err := c.releases().Get(t.Context(), release.Key{Namespace: c.ns, Name: "web"}, 1)
	if err != nil {
		t.Fatal(err)
	}
	put := func(revision int, status common.Status) {
		t.Helper()
		theirs.Version, theirs.Info.Status = revision, status
		if _, err := c.releases().Put(t.Context(), theirs); err != nil {
			t.Fatal(err)
		}
	}
	put(2, common.StatusPendingUpgrade)
	put(1, common.StatusSuperseded)
	eventually(t, "it waits for Helm", func() bool {
		report, _ := h.Converge(t.Context(), b)
		return report.State == bundle.StateApplying && strings.HasSuffix(report.Message, "waiting for another client of Helm: revision 2 is pending-upgrade")
	})
	// Objects are healed meanwhile, and it waits all the same.
	c.patch(configMaps, "main", `{"data":{"key":"theirs"}}`)
	eventually(t, "the object is healed", func() bool { return c.value("main") == "1" })
	c.wantHistory("1 superseded", "2 pending-upgrade")
	put(2, common.StatusDeployed)
	eventually(t, "our revision is the last one", func() bool { return slices.Equal(c.history(), []string{"2 superseded", "3 deployed"}) })
	deploy(t, h.Engine, b)
}

func TestLostInventoryRunsNoHookAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("once", true), "pre-install,pre-upgrade", 0, ""))
	deploy(t, c.engine(nil), b)
	ran := c.get(jobs, c.ns, "once").GetUID()
	c.loseRecords("")
	deploy(t, c.engine(nil), b)
	if c.get(jobs, c.ns, "once").GetUID() != ran {
		t.Error("a hook was run again")
	}
	c.wantHistory("1 deployed")
}

func TestReleaseOfHelmIsAdoptedAsAnUpgrade(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	// What `helm install` leaves.
	marked := func(name string) *unstructured.Unstructured {
		obj := c.configMap(name, "helm")
		obj.SetLabels(map[string]string{"app.kubernetes.io/managed-by": "Helm"})
		obj.SetAnnotations(map[string]string{"meta.helm.sh/release-name": "web", "meta.helm.sh/release-namespace": c.ns})
		return obj
	}
	record, err := release.New(c.releaseItem("web", bundle.ReleaseOptions{}, c.configMap("main", "helm"), c.configMap("dropped", "helm")), 7)
	if err != nil {
		t.Fatal(err)
	}
	release.SetStatus(record, common.StatusDeployed, "Install complete", time.Now(), time.Now())
	if _, err := c.releases().Put(t.Context(), record); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"main", "dropped", "other"} {
		c.create(configMaps, marked(name))
	}
	e := c.engine(nil)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("install", true), "pre-install", 0, ""),
		asHook(c.job("upgrade", true), "pre-upgrade", 0, ""))
	deploy(t, e, b)
	c.wantHistory("7 superseded", "8 deployed")
	c.wantAll(configMaps, "main", "other")
	c.wantAll(jobs, "upgrade")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAll(configMaps, "other")
	c.wantHistory()
}
