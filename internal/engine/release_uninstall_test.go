package engine_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"

	"github.com/towline/towline/internal/bundle"
)

// collectJobRuns adds the existing Jobs of the test's namespace as "name UID".
func (c *cluster) collectJobRuns(into map[string]bool) {
	c.t.Helper()
	list, err := c.objects.Resource(jobs).Namespace(c.ns).List(c.t.Context(), metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	for _, job := range list.Items {
		into[job.GetName()+" "+string(job.GetUID())] = true
	}
}

func (c *cluster) deleteJobs() {
	c.t.Helper()
	err := c.objects.Resource(jobs).Namespace(c.ns).DeleteCollection(c.t.Context(),
		metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}, metav1.ListOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		c.t.Fatal(err)
	}
	eventually(c.t, "Jobs are deleted", func() bool {
		runs := map[string]bool{}
		c.collectJobRuns(runs)
		return len(runs) == 0
	})
}

// isCut returns whether the connection was cut.
func (m *meter) isCut() bool { m.mu.Lock(); defer m.mu.Unlock(); return m.cutting && m.left == 0 }

// TestEachHookRunsOnceWhereverTheUninstallationIsCut cuts an uninstallation before and after every write.
func TestEachHookRunsOnceWhereverTheUninstallationIsCut(t *testing.T) {
	t.Parallel()
	for name, late := range map[string]bool{"before a request": false, "after a request": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"),
				asHook(c.job("before", true), "pre-delete", 0, ""), asHook(c.job("after", true), "post-delete", 0, ""))
			line, n := &meter{late: late, writes: true}, 1
			for ; c.interruptUninstallation(b, line, n); n++ {
			}
			if n < 8 {
				t.Errorf("the release was interrupted only %d times", n-1)
			}
		})
	}
}

// interruptUninstallation installs b, and uninstalls it with an engine whose connection is cut after n writes and then
// with another engine. It returns whether the connection was cut.
func (c *cluster) interruptUninstallation(b bundle.Bundle, line *meter, n int) bool {
	c.t.Helper()
	line.endCut()
	deploy(c.t, c.engine(nil), b)
	line.cutAfter(n)
	e := c.engine(line)
	runs := map[string]bool{}
	eventually(c.t, "cut or withdrawn", func() bool {
		done, err := e.Withdraw(c.t.Context(), bundle.Withdrawal{ID: b.ID})
		c.collectJobRuns(runs)
		return done || err != nil
	})
	cut := line.isCut()
	withdraw(c.t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.collectJobRuns(runs)
	if len(runs) != 2 {
		c.t.Errorf("cut after %d writes: hooks were run as %v", n, runs)
	}
	c.wantAllNames(configMaps)
	c.wantHistory()
	c.deleteJobs()
	return cut && !c.t.Failed()
}

// TestEachHookRunsOnceWhereverTheRollbackIsCut cuts the tests of a failed revision and its rollback before every third
// write, because each cut takes seconds.
func TestEachHookRunsOnceWhereverTheRollbackIsCut(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	options := bundle.ReleaseOptions{Atomic: true, RunTests: true, MaxHistory: 5}
	hooks := func() []*unstructured.Unstructured {
		return []*unstructured.Unstructured{
			asHook(c.job("before", true), "pre-rollback", 0, ""), asHook(c.job("after", true), "post-rollback", 0, ""),
			asHook(c.job("test-one", true), "test", 0, ""),
		}
	}
	good := c.chart(options, append(hooks(), c.configMap("main", "1"))...)
	line, cut := &meter{writes: true}, true
	for n := 1; cut && !t.Failed(); n += 3 {
		line.endCut()
		deploy(t, c.engine(nil), good)
		c.deleteJobs()
		broken := c.chart(options, append(hooks(), c.configMap("main", fmt.Sprint("2-", n)),
			asHook(withDeadline(c.job("test-two", false)), "test", 1, ""))...)
		line.cutAfter(n)
		e := c.engine(line)
		runs := map[string]bool{}
		var report bundle.Report
		eventually(t, "cut or rolled back", func() bool {
			report, _ = e.Converge(t.Context(), broken)
			c.collectJobRuns(runs)
			return line.isCut() || report.State == bundle.StateFailed
		})
		if cut = line.isCut(); cut {
			report = bundle.Report{} // Converge has failed without a report
		}
		e = c.engine(nil)
		// The engine retries a rolled back revision after a pause, with another run of all hooks.
		eventually(t, "rolled back", func() bool {
			if report.State != bundle.StateFailed {
				report, _ = e.Converge(t.Context(), broken)
			}
			c.collectJobRuns(runs)
			return report.State == bundle.StateFailed
		})
		if len(runs) != 4 || c.value("main") != "1" {
			t.Errorf("cut after %d writes: hooks were run as %v, main is %q, report %q", n, runs, c.value("main"), report.Message)
		}
		if !cut && n < 15 {
			t.Errorf("the release was interrupted only %d times", n-1)
		}
		withdraw(t, e, bundle.Withdrawal{ID: good.ID})
		c.deleteJobs()
	}
}

// TestFailedPreDeleteHookKeepsTheRelease checks that a failed pre-delete hook stops the uninstallation, and that the
// engine retries it after a pause.
func TestFailedPreDeleteHookKeepsTheRelease(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(withDeadline(c.job("bye", false)), "pre-delete", 0, ""))
	deploy(t, e, b)
	var failure error
	eventually(t, "failed", func() bool {
		var done bool
		done, failure = e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID})
		return done || failure != nil
	})
	want := fmt.Sprintf("uninstalling failed: pre-delete hook Job batch %s/bye failed: ", c.ns)
	if failure == nil || !strings.Contains(failure.Error(), want) {
		t.Fatalf("got %v, want %q", failure, want)
	}
	c.wantAllNames(configMaps, "main")
	if history := c.listHistory(); len(history) != 1 {
		t.Errorf("history: %q", history)
	}
	runs := map[string]bool{}
	eventually(t, "tried again", func() bool {
		done, _ := e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID})
		c.collectJobRuns(runs)
		return done || len(runs) > 1
	})
	c.wantAllNames(configMaps, "main")
}

// TestFailedPostDeleteHookIsIgnored checks that a failed post-delete hook does not stop the uninstallation, as in Helm.
func TestFailedPostDeleteHookIsIgnored(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(withDeadline(c.job("after", false)), "post-delete", 0, ""))
	deploy(t, e, b)
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAllNames(jobs, "after")
	c.wantAllNames(configMaps)
	c.wantHistory()
}

func TestFailedTestHookFailsTheRevision(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	report := convergeUntilDone(t, c.engine(nil), c.chart(bundle.ReleaseOptions{RunTests: true}, c.configMap("main", "1"),
		asHook(withDeadline(c.job("check", false)), "test", 0, "")))
	want := fmt.Sprintf("test hook Job batch %s/check failed: ", c.ns)
	if report.State != bundle.StateFailed || !strings.Contains(report.Message, want) {
		t.Errorf("got %s %q, want %q", report.State, report.Message, want)
	}
	c.wantAllNames(configMaps, "main")
}

// TestPostHooksRunAfterTheWait checks that no post-install hook runs while objects are not ready.
func TestPostHooksRunAfterTheWait(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.chart(bundle.ReleaseOptions{Wait: true, WaitForJobs: true, Timeout: 2 * time.Second}, c.job("never-ends", false),
		asHook(c.job("after", true), "post-install", 0, ""))
	if report := convergeUntilDone(t, c.engine(nil), b); !strings.Contains(report.Message, "not ready within 2s: Job batch "+c.ns+"/never-ends") {
		t.Errorf("got %s %q", report.State, report.Message)
	}
	c.wantAllNames(jobs, "never-ends")
}

// TestWaitWithoutWaitForJobs checks that wait alone does not wait for the end of Jobs.
func TestWaitWithoutWaitForJobs(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	deploy(t, c.engine(nil), c.chart(bundle.ReleaseOptions{Wait: true, Timeout: 30 * time.Second}, c.job("never-ends", false)))
}

// TestReleasesFollowTheOrderOfTheList checks that a release begins after the previous release is deployed, also if that
// release fails first, and that releases are uninstalled in the reverse order.
func TestReleasesFollowTheOrderOfTheList(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	line := &meter{}
	e := c.engine(line)
	first := func(hook *unstructured.Unstructured) bundle.Bundle {
		b := c.chart(bundle.ReleaseOptions{Timeout: 3 * time.Second}, c.configMap("one", "1"), asHook(hook, "pre-install,pre-upgrade", 0, ""))
		b.Items = append(b.Items, c.releaseItem("second", bundle.ReleaseOptions{}, c.configMap("two", "1")))
		return b
	}
	hangs := first(c.job("prepare", false))
	report, err := e.Converge(t.Context(), hangs)
	if err != nil || report.State != bundle.StateApplying {
		t.Fatalf("got %s %q, %v", report.State, report.Message, err)
	}
	c.wantAllNames(configMaps)
	if report := convergeUntilDone(t, e, hangs); report.State != bundle.StateFailed {
		t.Fatalf("got %s %q", report.State, report.Message)
	}
	c.wantAllNames(configMaps)

	ends := first(c.job("prepare", true))
	ends.Items[0].Release.Options.Timeout = time.Minute
	deploy(t, e, ends)
	line.take()
	withdraw(t, e, bundle.Withdrawal{ID: ends.ID})
	if got, want := c.listWrites(line), []string{"DELETE configmaps/two", "DELETE configmaps/one"}; !slices.Equal(got, want) {
		t.Errorf("requests: got %q, want %q", got, want)
	}
}

// TestUninstallationReversesTheOrder checks the order in which the kinds of a release are deleted.
func TestUninstallationReversesTheOrder(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	line := &meter{}
	e := c.engine(line)
	object := func(apiVersion, kind string, fields map[string]any) *unstructured.Unstructured {
		all := map[string]any{"apiVersion": apiVersion, "kind": kind, "metadata": map[string]any{"name": "one", "namespace": c.ns}}
		for name, value := range fields {
			all[name] = value
		}
		return &unstructured.Unstructured{Object: all}
	}
	b := c.chart(bundle.ReleaseOptions{},
		object("v1", "ServiceAccount", nil), c.configMap("one", "1"), object("rbac.authorization.k8s.io/v1", "Role", map[string]any{"rules": []any{}}),
		object("v1", "Service", map[string]any{"spec": map[string]any{"ports": []any{map[string]any{"port": int64(80)}}}}), c.job("one", true))
	deploy(t, e, b)
	line.take()
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	want := []string{"DELETE jobs/one", "DELETE services/one", "DELETE roles/one", "DELETE configmaps/one", "DELETE serviceaccounts/one"}
	if got := c.listWrites(line); !slices.Equal(got, want) {
		t.Errorf("requests: got %q, want %q", got, want)
	}
}

// TestKeptHistoryIsContinued deploys a release again after an uninstallation with the option keepHistory, like
// `helm install --replace`.
func TestKeptHistoryIsContinued(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.chart(bundle.ReleaseOptions{KeepHistory: true, MaxHistory: 10}, c.configMap("main", "1"),
		asHook(c.configMap("on-install", "1"), "pre-install", 0, ""), asHook(c.configMap("on-upgrade", "1"), "pre-upgrade", 0, ""))
	deploy(t, e, b)
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantHistory("1 uninstalled")
	c.delete(configMaps, "on-install")
	deploy(t, e, b)
	c.wantHistory("1 uninstalled", "2 deployed")
	c.wantAllNames(configMaps, "main", "on-install")
}

// TestDeletionPropagationIsObeyed uninstalls a release whose object has a dependent that is not deleted yet.
func TestDeletionPropagationIsObeyed(t *testing.T) {
	t.Parallel()
	for propagation, waits := range map[string]bool{"": false, "background": false, "foreground": true} {
		t.Run("with "+propagation, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			e := c.engine(nil)
			b := c.chart(bundle.ReleaseOptions{DeletionPropagation: propagation}, c.configMap("main", "1"))
			deploy(t, e, b)
			dependent := c.configMap("dependent", "1")
			dependent.SetFinalizers([]string{"example.com/hold"})
			dependent.SetOwnerReferences([]metav1.OwnerReference{{
				APIVersion: "v1", Kind: "ConfigMap", Name: "main", UID: c.get(configMaps, c.ns, "main").GetUID(), BlockOwnerDeletion: ptr.To(true),
			}})
			c.create(configMaps, dependent)
			created := time.Now()
			eventually(t, "the garbage collector knows the dependent", func() bool { return time.Since(created) > 3*time.Second })
			eventually(t, "the dependent is being deleted", func() bool {
				if _, err := e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID}); err != nil {
					t.Fatal(err)
				}
				return c.get(configMaps, c.ns, "dependent").GetDeletionTimestamp() != nil
			})
			if main := c.get(configMaps, c.ns, "main"); (main != nil) != waits {
				t.Errorf("the object exists before its dependent is deleted: %t, want %t", main != nil, waits)
			}
			c.patch(configMaps, "dependent", `{"metadata":{"finalizers":null}}`)
			withdraw(t, e, bundle.Withdrawal{ID: b.ID})
			c.wantAllNames(configMaps)
		})
	}
}
