package engine_test

import (
	"strings"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/release/common"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// tooMuchMemory is in the message of a release that needs a record for which limitedEngine has not enough memory.
const tooMuchMemory = "the cluster returned what needs too much memory"

// limitedEngine returns an engine that has not enough memory for the records of inflateRecord.
func (c *cluster) limitedEngine() *engine.Engine {
	memory := kube.NewResponseMemory(16 << 20)
	return c.engine(nil, func(o *engine.Options) { o.RecordMemory = memory.Reserve("eu", 4<<20) })
}

// inflateRecord writes the record of a revision of release web with 10 MiB of notes, which Helm compresses.
func (c *cluster) inflateRecord(revision int) {
	c.t.Helper()
	record, ok, err := c.releases().Get(c.t.Context(), release.Key{Namespace: c.ns, Name: "web"}, revision)
	if err != nil || !ok {
		c.t.Fatalf("read revision %d: got %t, error %v", revision, ok, err)
	}
	record.Info.Notes = strings.Repeat("a", 10<<20)
	store := c.releases()
	found, err := store.List(c.t.Context(), release.Key{Namespace: c.ns, Name: "web"})
	if err != nil {
		c.t.Fatal(err)
	}
	store.Annotations = found[len(found)-1].Secret.Annotations // the bundle stays its owner
	if _, err := store.Put(c.t.Context(), record.Release); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) wantFailed(report bundle.Report, text string) {
	c.t.Helper()
	if report.State != bundle.StateFailed || !strings.Contains(report.Message, text) || !strings.Contains(report.Message, tooMuchMemory) {
		c.t.Errorf("got %s %q, want it to contain %q and %q", report.State, report.Message, text, tooMuchMemory)
	}
}

// TestFailedUpgradeWithoutMemoryForTheFormerRecord ends as failed: it does not repeat the rollback or the deletion
// again and again.
func TestFailedUpgradeWithoutMemoryForTheFormerRecord(t *testing.T) {
	t.Parallel()
	for text, options := range map[string]bundle.ReleaseOptions{
		"; it is not rolled back: ":                        {Atomic: true, MaxHistory: 5},
		"; the objects that it created are not deleted: ": {CleanupOnFail: true, MaxHistory: 5},
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			deploy(t, c.engine(nil), c.chart(options, c.configMap("main", "1")))
			c.inflateRecord(1)
			failing := c.chart(options, c.configMap("main", "2"), asHook(fails(c.job("check", false)), "post-upgrade", 0, ""))
			c.wantFailed(settle(t, c.limitedEngine(), failing), text)
			c.wantHistory("1 deployed", "2 failed")
		})
	}
}

// TestUpgradeWithoutMemoryForTheFormerRecord leaves the status of that record as it is.
func TestUpgradeWithoutMemoryForTheFormerRecord(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	options := bundle.ReleaseOptions{MaxHistory: 5}
	deploy(t, c.engine(nil), c.chart(options, c.configMap("main", "1")))
	c.inflateRecord(1)
	e := c.limitedEngine()
	deploy(t, e, c.chart(options, c.configMap("main", "2")))
	c.wantHistory("1 deployed", "2 deployed")
	deploy(t, e, c.chart(options, c.configMap("main", "3")))
	c.wantHistory("1 deployed", "2 superseded", "3 deployed")
}

// TestAdoptionWithoutMemoryForTheRecordOfHelm fails, and changes none of its objects.
func TestAdoptionWithoutMemoryForTheRecordOfHelm(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	record, err := release.NewRecord(c.releaseItem("web", bundle.ReleaseOptions{}, c.configMap("main", "helm")), 7)
	if err != nil {
		t.Fatal(err)
	}
	release.SetStatus(record, common.StatusDeployed, "Install complete", time.Now(), time.Now())
	if _, err := c.releases().Put(t.Context(), record); err != nil {
		t.Fatal(err)
	}
	c.inflateRecord(7)
	c.wantFailed(settle(t, c.limitedEngine(), c.chart(bundle.ReleaseOptions{}, c.configMap("new", "1"))), "upgrade of revision 8 failed: ")
	c.wantAll(configMaps)
	c.wantHistory("7 deployed", "8 failed")
}

// TestUninstallationWithoutMemoryForTheHooks fails, and deletes nothing: the hooks that run before must not be left
// out.
func TestUninstallationWithoutMemoryForTheHooks(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("before", true), "pre-delete", 0, ""))
	deploy(t, c.engine(nil), b)
	c.inflateRecord(1)
	e := c.limitedEngine()
	const want = "uninstalling failed: read the record of release "
	for range 2 {
		done, err := e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID})
		if done || err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), tooMuchMemory) {
			t.Errorf("got %t, error %v, want %s", done, err, want)
		}
	}
	c.wantAll(configMaps, "main")
	c.wantHistory("1 deployed")
}
