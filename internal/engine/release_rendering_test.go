package engine_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"helm.sh/helm/v4/pkg/release/common"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/release"
)

// TestReleaseRecordHasItsRendering deploys a release whose templates use the revision.
func TestReleaseRecordHasItsRendering(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"))
	b.Items[0].Release.Inputs, b.Items[0].Release.Revision, b.Items[0].Release.IsUpgrade = "inputs", 4, true
	deploy(t, c.engine(nil), b)
	record, err := c.objects.Resource(secrets).Namespace(c.ns).Get(t.Context(), release.SecretName("web", 1), metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got, _ := release.RenderingOf(metav1.ObjectMeta{Annotations: record.GetAnnotations()})
	if diff := cmp.Diff(release.Rendering{Inputs: "inputs", Revision: 4, IsUpgrade: true}, got); diff != "" {
		t.Errorf("the rendering differs (-want +got):\n%s", diff)
	}
}

// withInstallation returns b with a release that the hub has rendered as an installation of revision 1.
func withInstallation(b bundle.Bundle) bundle.Bundle {
	r := b.Items[0].Release
	r.Inputs, r.Revision, r.IsUnconfirmed = "inputs", 1, true
	return b
}

// withSecondRendering returns b with the second rendering of its release.
func withSecondRendering(b bundle.Bundle, revision int, isUpgrade bool) bundle.Bundle {
	b = withRendering(b, revision, isUpgrade)
	b.Items[0].Release.IsUnconfirmed = false
	return b
}

// withRendering returns b with another rendering of its release.
func withRendering(b bundle.Bundle, revision int, isUpgrade bool) bundle.Bundle {
	b.Items = slices.Clone(b.Items)
	r := *b.Items[0].Release
	r.Revision, r.IsUpgrade = revision, isUpgrade
	b.Items[0].Release = &r
	return b
}

// putRecord writes a release record like helm.
func (c *cluster) putRecord(item bundle.Item, revision int, status common.Status) {
	c.t.Helper()
	c.putRecordAt(time.Now().Add(-time.Hour), item, revision, status)
}

// putRecordAt writes a release record like helm at a time.
func (c *cluster) putRecordAt(at time.Time, item bundle.Item, revision int, status common.Status) {
	c.t.Helper()
	record, err := release.NewRecord(item, revision)
	if err != nil {
		c.t.Fatal(err)
	}
	release.SetInfo(record, status, "by helm", at, at)
	if _, err := c.releases().Put(c.t.Context(), record); err != nil {
		c.t.Fatal(err)
	}
}

// compareOutdated converges b and returns the report. It fails the test unless b is still being applied.
func compareOutdated(t *testing.T, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	report, err := e.CompareRenderings(t.Context(), b)
	if err != nil || report.State != bundle.StateApplying {
		t.Fatalf("got %+v and error %v, want the state Applying", report, err)
	}
	return report
}

// TestReleaseOfHelmIsRenderedAgain deploys a release that has records of helm. The engine makes no changes for the
// first rendering, also after a restart. It deploys the second rendering.
func TestReleaseOfHelmIsRenderedAgain(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		statuses []common.Status
		want     bundle.OutdatedRelease
		history  []string
	}{
		"deployed": {
			statuses: []common.Status{common.StatusSuperseded, common.StatusDeployed},
			want:     bundle.OutdatedRelease{Revision: 3, IsUpgrade: true},
			history:  []string{"1 superseded", "2 superseded", "3 deployed"},
		},
		"failed": {
			statuses: []common.Status{common.StatusFailed, common.StatusFailed, common.StatusFailed},
			want:     bundle.OutdatedRelease{Revision: 4},
			history:  []string{"1 failed", "2 failed", "3 failed", "4 deployed"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			b := withInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
			for i, status := range tc.statuses {
				c.putRecord(b.Items[0], i+1, status)
			}
			tc.want.Namespace, tc.want.Name = c.ns, "web"
			before := c.listHistory()
			digest, err := b.Digest()
			if err != nil {
				t.Fatal(err)
			}
			m := &meter{}
			for range 2 { // the second engine runs after a restart of the agent
				report := compareOutdated(t, c.engine(m), b)
				want := bundle.Report{
					ID: b.ID, Digest: digest, State: bundle.StateApplying, Outdated: []bundle.OutdatedRelease{tc.want},
					Message: fmt.Sprintf("Helm release %s/web: waiting for the hub to render it as revision %d, as the release records demand",
						c.ns, tc.want.Revision),
				}
				if diff := cmp.Diff(want, report, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("the report differs (-want +got):\n%s", diff)
				}
			}
			for _, line := range m.take() {
				if !strings.HasPrefix(line, "GET ") {
					t.Errorf("the engine sent the request %s", line)
				}
			}
			c.wantHistory(before...)
			second := withSecondRendering(b, tc.want.Revision, tc.want.IsUpgrade)
			if report := deploy(t, c.engine(nil), second); len(report.Outdated) > 0 {
				t.Errorf("got %v after the second rendering", report.Outdated)
			}
			c.wantHistory(tc.history...)
		})
	}
}

// TestSecondRenderingIsDeployed deploys a second rendering although helm has deployed another revision after the first.
func TestSecondRenderingIsDeployed(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := withInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "1")))
	c.putRecord(b.Items[0], 1, common.StatusDeployed)
	if report := compareOutdated(t, c.engine(nil), b); len(report.Outdated) != 1 {
		t.Fatalf("got %+v, want an outdated release", report)
	}
	c.putRecord(b.Items[0], 2, common.StatusFailed)
	deploy(t, c.engine(nil), withSecondRendering(b, 2, true))
	c.wantHistory("1 superseded", "2 failed", "3 deployed")
}

// TestReleaseOfHelmWithoutSecondRendering deploys the first rendering of a hub that does not render again, and of a hub
// that was restored from a backup.
func TestReleaseOfHelmWithoutSecondRendering(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*bundle.Bundle){
		"an earlier version of the hub": func(b *bundle.Bundle) { b.Items[0].Release.IsUnconfirmed = false },
		"a restored hub":                func(b *bundle.Bundle) { b.KeepObjects = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			b := withInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
			c.putRecord(b.Items[0], 1, common.StatusDeployed)
			change(&b)
			deploy(t, c.engine(nil), b)
			c.wantHistory("1 superseded", "2 deployed")
		})
	}
}

// TestOwnReleaseIsRenderedAgain delivers an upgrade as an installation, like a hub that has lost its
// ConfigurationGroups. The second rendering equals the deployed revision, so it creates no new revision.
func TestOwnReleaseIsRenderedAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	first := withInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
	deploy(t, e, first)
	if report := converge(t, e, first); report.State != bundle.StateApplied {
		t.Errorf("the same again: got %+v", report)
	}
	second := withRendering(withInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "revision 2"))), 2, true)
	second.Items[0].Release.Inputs = "changed"
	deploy(t, e, second)
	c.wantHistory("1 superseded", "2 deployed")
	lost := withInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "revision 1")))
	lost.Items[0].Release.Inputs = "changed"
	report := compareOutdated(t, e, lost)
	if diff := cmp.Diff([]bundle.OutdatedRelease{{Namespace: c.ns, Name: "web", Revision: 2, IsUpgrade: true}}, report.Outdated); diff != "" {
		t.Errorf("the outdated releases differ (-want +got):\n%s", diff)
	}
	deploy(t, e, withSecondRendering(second, 2, true))
	c.wantHistory("1 superseded", "2 deployed")
}

// TestManualUpgradeIsNotOutdated upgrades a deployed release with helm. A change of another object of the bundle needs
// no new rendering.
func TestManualUpgradeIsNotOutdated(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := withInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
	deploy(t, e, b)
	c.putRecord(b.Items[0], 2, common.StatusDeployed)
	b.Items = append(slices.Clone(b.Items), bundle.Item{Objects: c.bundle("other", c.configMap("other", "1")).Items[0].Objects})
	if report, err := e.CompareRenderings(t.Context(), b); err != nil || len(report.Outdated) > 0 {
		t.Errorf("got the outdated releases %v and error %v", report.Outdated, err)
	}
	if report := converge(t, e, b); len(report.Outdated) > 0 {
		t.Errorf("converged: got the outdated releases %v", report.Outdated)
	}
}

// TestReleaseIsComparedAfterTheHelmClient deploys two releases while helm installs the second. The first release does
// not wait. The second release is rendered again when helm has finished, and does not begin before, also in a restarted
// agent.
func TestReleaseIsComparedAfterTheHelmClient(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		status common.Status
		want   bundle.OutdatedRelease // without a revision if the rendering is not outdated
	}{
		"deployed": {status: common.StatusDeployed, want: bundle.OutdatedRelease{Revision: 2, IsUpgrade: true}},
		"failed":   {status: common.StatusFailed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			e := c.runEngine(t, nil).Engine
			b := withInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "1")))
			b.Items[0].Release.Revision = 2 // the revision after the pending record
			first := c.releaseItem("first", bundle.ReleaseOptions{}, c.configMap("first", "1"))
			first.Release.Inputs, first.Release.Revision, first.Release.IsUnconfirmed = "inputs", 1, true
			b.Items = []bundle.Item{first, b.Items[0]}
			c.putRecordAt(time.Now(), b.Items[1], 1, common.StatusPendingInstall)
			if report, err := e.CompareRenderings(t.Context(), b); err != nil || len(report.Outdated) > 0 {
				t.Fatalf("while helm works: got the outdated releases %v and error %v", report.Outdated, err)
			}
			eventually(t, "it waits for helm", func() bool {
				report, _ := e.Converge(t.Context(), b)
				return report.State == bundle.StateApplying && strings.Contains(report.Message, "web: waiting for another client of Helm")
			})
			c.wantNames(configMaps, "first")
			c.wantHistory("1 pending-install")
			c.putRecord(b.Items[1], 1, tc.status)
			if tc.want.Revision == 0 {
				deploy(t, e, b)
				c.wantHistory("1 failed", "2 deployed")
				return
			}
			tc.want.Namespace, tc.want.Name = c.ns, "web"
			eventually(t, "it waits for the hub", func() bool {
				found, ok, err := e.FindDeployed(t.Context(), b.ID)
				return err == nil && ok && cmp.Equal([]bundle.OutdatedRelease{tc.want}, found.Report.Outdated)
			})
			c.delete(secrets, release.SecretName("web", 1)) // the rendering is not outdated any more, but the hub has the report
			for _, e := range []*engine.Engine{e, c.engine(nil)} {
				report, ok, err := e.Resume(t.Context(), b.ID)
				if err != nil || !ok || !cmp.Equal([]bundle.OutdatedRelease{tc.want}, report.Outdated) || report.State != bundle.StateApplying {
					t.Errorf("got %+v, %t and error %v, want the outdated release", report, ok, err)
				}
			}
			c.putRecord(b.Items[1], 1, tc.status)
			c.wantNames(configMaps, "first")
			c.wantHistory("1 deployed")
			second := b
			second.Items = slices.Clone(b.Items)
			again := *b.Items[1].Release
			again.Revision, again.IsUpgrade, again.IsUnconfirmed = 2, true, false
			second.Items[1].Release = &again
			if report := deploy(t, e, second); len(report.Outdated) > 0 {
				t.Errorf("after the second rendering: got the outdated releases %v", report.Outdated)
			}
			c.wantHistory("1 superseded", "2 deployed")
		})
	}
}

// TestReportHasTheReleasesThatHaveNotBegun compares two releases. Helm has deployed one of them.
func TestReportHasTheReleasesThatHaveNotBegun(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := withInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
	other := c.releaseItem("other", bundle.ReleaseOptions{}, c.configMap("other", "1"))
	other.Release.Inputs, other.Release.Revision, other.Release.IsUnconfirmed = "inputs", 1, true
	b.Items = append(b.Items, other)
	c.putRecord(b.Items[0], 1, common.StatusDeployed)
	want := []bundle.OutdatedRelease{{Namespace: c.ns, Name: "web", Revision: 2, IsUpgrade: true}, {Namespace: c.ns, Name: "other"}}
	if diff := cmp.Diff(want, compareOutdated(t, c.engine(nil), b).Outdated); diff != "" {
		t.Errorf("before it is delivered (-want +got):\n%s", diff)
	}
	report, err := c.engine(nil).Converge(t.Context(), b)
	if diff := cmp.Diff(want, report.Outdated); err != nil || diff != "" {
		t.Errorf("after it is delivered: got error %v (-want +got):\n%s", err, diff)
	}
	c.wantNames(configMaps)
}

// TestChangedReleaseIsRenderedAgain delivers a rendering that does not follow the release records: an earlier bundle
// was never deployed, or helm has deployed a later revision.
func TestChangedReleaseIsRenderedAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := withInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "1")))
	wantOutdated := func(b bundle.Bundle, revision int, isUpgrade bool) {
		t.Helper()
		report := compareOutdated(t, e, b)
		want := []bundle.OutdatedRelease{{Namespace: c.ns, Name: "web", Revision: revision, IsUpgrade: isUpgrade}}
		if diff := cmp.Diff(want, report.Outdated); diff != "" {
			t.Errorf("the outdated releases differ (-want +got):\n%s", diff)
		}
	}
	wantOutdated(withRendering(b, 2, true), 1, false)
	deploy(t, e, withSecondRendering(b, 1, false))
	c.putRecord(b.Items[0], 2, common.StatusDeployed)
	changed := withInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "2")))
	changed.Items[0].Release.Inputs = "changed"
	wantOutdated(withRendering(changed, 2, true), 3, true)
	deploy(t, e, withRendering(changed, 3, true))
	c.wantHistory("1 superseded", "2 superseded", "3 deployed")

	// Without release records the engine uses the revision of the inventory.
	for i := range 3 {
		c.delete(secrets, release.SecretName("web", i+1))
	}
	last := withInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "3")))
	last.Items[0].Release.Inputs = "last"
	deploy(t, e, withRendering(last, 4, true))
	c.wantHistory("4 deployed")
}
