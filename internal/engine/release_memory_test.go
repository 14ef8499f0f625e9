package engine_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/release/common"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// tooMuchMemory is a part of the message about a release record that is too large for limitedEngine.
const tooMuchMemory = "the cluster returned data that needs too much memory"

// tooLarge is a size of notes that is too large for limitedEngine.
const tooLarge = 10 << 20

// limitedEngine returns an engine with a limit of 8 MiB for a record.
func (c *cluster) limitedEngine() *engine.Engine {
	memory := kube.NewResponseMemory(16 << 20)
	return c.engine(nil, func(o *engine.Options) { o.RecordMemory = memory.Reserve("eu", 4<<20) })
}

// inflateRecord adds notes of size bytes to the record of a revision of release web. Helm compresses them.
func (c *cluster) inflateRecord(revision, size int) {
	c.t.Helper()
	record, ok, err := c.releases().Get(c.t.Context(), release.Key{Namespace: c.ns, Name: "web"}, revision)
	if err != nil || !ok {
		c.t.Fatalf("read revision %d: got %t, error %v", revision, ok, err)
	}
	record.Info.Notes = strings.Repeat("a", size)
	store := c.releases()
	found, err := store.List(c.t.Context(), release.Key{Namespace: c.ns, Name: "web"})
	if err != nil {
		c.t.Fatal(err)
	}
	store.Annotations = found[len(found)-1].Secret.Annotations // the bundle stays the owner of the record
	if _, err := store.Put(c.t.Context(), record.Release); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) wantFailed(report bundle.Report, text string) {
	c.t.Helper()
	if report.State != bundle.StateFailed || !strings.Contains(report.Message, text) || !strings.Contains(report.Message, tooMuchMemory) {
		c.t.Errorf("got %s %q, want a message with %q and %q", report.State, report.Message, text, tooMuchMemory)
	}
}

// TestFailedUpgradeWithoutMemoryForTheFormerRecord checks that the upgrade fails without repeated attempts of the
// rollback or the deletion.
func TestFailedUpgradeWithoutMemoryForTheFormerRecord(t *testing.T) {
	t.Parallel()
	for text, options := range map[string]bundle.ReleaseOptions{
		"; it is not rolled back: ":                       {Atomic: true, MaxHistory: 5},
		"; the objects that it created are not deleted: ": {CleanupOnFail: true, MaxHistory: 5},
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			deploy(t, c.engine(nil), c.chart(options, c.configMap("main", "1")))
			c.inflateRecord(1, tooLarge)
			failing := c.chart(options, c.configMap("main", "2"), asHook(withDeadline(c.job("check", false)), "post-upgrade", 0, ""))
			c.wantFailed(convergeUntilDone(t, c.limitedEngine(), failing), text)
			c.wantHistory("1 deployed", "2 failed")
		})
	}
}

// TestRollbackToALargeRecord uses a record that fits into the memory once, but not twice.
func TestRollbackToALargeRecord(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	options := bundle.ReleaseOptions{Atomic: true, MaxHistory: 5}
	deploy(t, c.engine(nil), c.chart(options, c.configMap("main", "1")))
	c.inflateRecord(1, 700<<10)
	failing := c.chart(options, c.configMap("main", "2"), asHook(withDeadline(c.job("check", false)), "post-upgrade", 0, ""))
	if report := convergeUntilDone(t, c.limitedEngine(), failing); report.State != bundle.StateFailed || !strings.HasSuffix(report.Message, "; rolled back to revision 1") {
		t.Errorf("got %s %q", report.State, report.Message)
	}
	c.wantHistory("1 superseded", "2 failed", "3 deployed")
}

// TestUpgradeWithoutMemoryForTheFormerRecord checks that an upgrade changes only the label of the former record.
func TestUpgradeWithoutMemoryForTheFormerRecord(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	options := bundle.ReleaseOptions{MaxHistory: 5}
	deploy(t, c.engine(nil), c.chart(options, c.configMap("main", "1")))
	c.inflateRecord(1, tooLarge)
	e := c.limitedEngine()
	deploy(t, e, c.chart(options, c.configMap("main", "2")))
	c.wantHistory("1 superseded", "2 deployed")
	deploy(t, e, c.chart(options, c.configMap("main", "3")))
	c.wantHistory("1 superseded", "2 superseded", "3 deployed")
}

// TestAdoptionWithoutMemoryForTheRecordOfHelm checks that the adoption fails, and that a withdrawal then does not
// change the release.
func TestAdoptionWithoutMemoryForTheRecordOfHelm(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	record, err := release.NewRecord(c.releaseItem("web", bundle.ReleaseOptions{}, c.configMap("main", "helm")), 7)
	if err != nil {
		t.Fatal(err)
	}
	release.SetInfo(record, common.StatusDeployed, "Install complete", time.Now(), time.Now())
	if _, err := c.releases().Put(t.Context(), record); err != nil {
		t.Fatal(err)
	}
	c.inflateRecord(7, tooLarge)
	c.create(configMaps, c.configMap("main", "helm"))
	e, b := c.limitedEngine(), c.chart(bundle.ReleaseOptions{}, c.configMap("new", "1"), asHook(c.job("before", true), "pre-delete", 0, ""))
	for range 2 {
		report, err := e.Converge(t.Context(), b)
		c.wantFailed(report, "release "+c.ns+"/web, revision 7: ")
		if err == nil {
			t.Error("got no error")
		}
	}
	c.wantHistory("7 deployed")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAllNames(configMaps, "main")
	c.wantAllNames(jobs)
	c.wantHistory("7 deployed")
}

// TestUninstallationWithoutMemoryForTheHooks checks that the uninstallation fails and deletes no objects, because it
// must not omit the pre-delete hooks.
func TestUninstallationWithoutMemoryForTheHooks(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("before", true), "pre-delete", 0, ""))
	deploy(t, c.engine(nil), b)
	c.inflateRecord(1, tooLarge)
	e := c.limitedEngine()
	const want, remedy = "uninstalling failed: read the record of release ", "delete the record, Secret sh.helm.release.v1.web.v1, on the cluster"
	for range 2 {
		done, err := e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID})
		if text := fmt.Sprint(err); done || !strings.Contains(text, want) || !strings.Contains(text, tooMuchMemory) || !strings.Contains(text, remedy) {
			t.Errorf("got %t, error %v, want %s", done, err, want)
		}
	}
	c.wantAllNames(configMaps, "main")
	c.wantHistory("1 deployed")
}

// TestUninstallationWithoutHooksNeedsNoMemory checks that only the label of the record is changed if the history is
// kept.
func TestUninstallationWithoutHooksNeedsNoMemory(t *testing.T) {
	t.Parallel()
	for want, options := range map[string]bundle.ReleaseOptions{
		"":              {DisableUninstallHooks: true},
		"1 uninstalled": {DisableUninstallHooks: true, KeepHistory: true},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			b := c.chart(options, c.configMap("main", "1"), asHook(c.job("before", true), "pre-delete", 0, ""))
			deploy(t, c.engine(nil), b)
			c.inflateRecord(1, tooLarge)
			withdraw(t, c.limitedEngine(), bundle.Withdrawal{ID: b.ID})
			c.wantAllNames(configMaps)
			c.wantAllNames(jobs)
			if got := strings.Join(c.listHistory(), ", "); got != want {
				t.Errorf("history: got %q, want %q", got, want)
			}
		})
	}
}
