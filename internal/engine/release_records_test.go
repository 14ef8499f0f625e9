package engine_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/release/common"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/release"
)

func TestDriftOfReleaseRecordsIsCorrected(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	b := c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "1"), asHook(c.job("once", true), "pre-install,pre-upgrade", 0, ""))
	deploy(t, h.Engine, b)
	ran := c.get(jobs, c.ns, "once").GetUID()

	// A user runs `helm uninstall`.
	c.delete(configMaps, "main")
	c.delete(secrets, release.SecretName("web", 1))
	eventually(t, "the release is back", func() bool { return c.value("main") == "1" && slices.Equal(c.listHistory(), []string{"1 deployed"}) })

	// A user runs `helm upgrade`.
	key := release.Key{Namespace: c.ns, Name: "web"}
	theirs, _, err := c.releases().Get(t.Context(), key, 1)
	if err != nil {
		t.Fatal(err)
	}
	theirs.Version = 2
	if _, err := c.releases().Put(t.Context(), theirs.Release); err != nil {
		t.Fatal(err)
	}
	theirs.Version, theirs.Info.Status = 1, common.StatusSuperseded
	if _, err := c.releases().Put(t.Context(), theirs.Release); err != nil {
		t.Fatal(err)
	}
	c.patch(configMaps, "main", `{"data":{"key":"theirs"}}`)
	eventually(t, "our revision is the last one", func() bool {
		return c.value("main") == "1" && slices.Equal(c.listHistory(), []string{"1 superseded", "2 superseded", "3 deployed"})
	})
	if c.get(jobs, c.ns, "once").GetUID() != ran {
		t.Error("the drift correction ran a hook")
	}
}

func TestReleaseRecordsAreNotCorrectedWhileHelmWorks(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	b := c.chart(bundle.ReleaseOptions{MaxHistory: 2}, c.configMap("main", "1"))
	deploy(t, h.Engine, b)
	// A user runs `helm upgrade` with a slow hook.
	theirs, _, err := c.releases().Get(t.Context(), release.Key{Namespace: c.ns, Name: "web"}, 1)
	if err != nil {
		t.Fatal(err)
	}
	put := func(revision int, status common.Status) {
		t.Helper()
		theirs.Version, theirs.Info.Status = revision, status
		if _, err := c.releases().Put(t.Context(), theirs.Release); err != nil {
			t.Fatal(err)
		}
	}
	put(2, common.StatusPendingUpgrade)
	put(1, common.StatusSuperseded)
	eventually(t, "it waits for Helm", func() bool {
		report, _ := h.Converge(t.Context(), b)
		return report.State == bundle.StateApplying && strings.HasSuffix(report.Message, "waiting for another client of Helm: revision 2 is pending-upgrade")
	})
	// The drift of objects is corrected meanwhile, but the release waits.
	c.patch(configMaps, "main", `{"data":{"key":"theirs"}}`)
	eventually(t, "the object is corrected", func() bool { return c.value("main") == "1" })
	c.wantHistory("1 superseded", "2 pending-upgrade")
	put(2, common.StatusDeployed)
	eventually(t, "our revision is the last one", func() bool { return slices.Equal(c.listHistory(), []string{"2 superseded", "3 deployed"}) })
	deploy(t, h.Engine, b)
}

func TestLostInventoryRunsNoHookAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"), asHook(c.job("once", true), "pre-install,pre-upgrade", 0, ""))
	deploy(t, c.engine(nil), b)
	ran := c.get(jobs, c.ns, "once").GetUID()
	c.deleteRecords("")
	deploy(t, c.engine(nil), b)
	if c.get(jobs, c.ns, "once").GetUID() != ran {
		t.Error("a hook was run again")
	}
	c.wantHistory("1 deployed")
}

func TestReleaseOfHelmIsAdoptedAsAnUpgrade(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	// The objects and the record have the state after `helm install`.
	marked := func(name string) *unstructured.Unstructured {
		obj := c.configMap(name, "helm")
		obj.SetLabels(map[string]string{"app.kubernetes.io/managed-by": "Helm"})
		obj.SetAnnotations(map[string]string{"meta.helm.sh/release-name": "web", "meta.helm.sh/release-namespace": c.ns})
		return obj
	}
	record, err := release.NewRecord(c.releaseItem("web", bundle.ReleaseOptions{}, c.configMap("main", "helm"), c.configMap("dropped", "helm")), 7)
	if err != nil {
		t.Fatal(err)
	}
	release.SetInfo(record, common.StatusDeployed, "Install complete", time.Now(), time.Now())
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
	c.wantAllNames(configMaps, "main", "other")
	c.wantAllNames(jobs, "upgrade")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAllNames(configMaps, "other")
	c.wantHistory()
}
