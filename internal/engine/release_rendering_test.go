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

// TestReleaseRecordHasItsRendering deploys a release whose templates read the revision.
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

// asInstallation makes the release of b one that the hub has rendered as an installation of revision 1.
func asInstallation(b bundle.Bundle) bundle.Bundle {
	r := b.Items[0].Release
	r.Inputs, r.Revision, r.IsUnconfirmed = "inputs", 1, true
	return b
}

// renderedAgain returns b with the second rendering of its release.
func renderedAgain(b bundle.Bundle, revision int, isUpgrade bool) bundle.Bundle {
	b = rendered(b, revision, isUpgrade)
	b.Items[0].Release.IsUnconfirmed = false
	return b
}

// rendered returns b with another rendering of its release.
func rendered(b bundle.Bundle, revision int, isUpgrade bool) bundle.Bundle {
	b.Items = slices.Clone(b.Items)
	r := *b.Items[0].Release
	r.Revision, r.IsUpgrade = revision, isUpgrade
	b.Items[0].Release = &r
	return b
}

// putRecord writes a record of a release as helm does.
func (c *cluster) putRecord(item bundle.Item, revision int, status common.Status) {
	c.t.Helper()
	c.putRecordAt(time.Now().Add(-time.Hour), item, revision, status)
}

// putRecordAt writes a record that helm has written at a time.
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

// compareOutdated compares b and returns the report, which is that b is not applied.
func compareOutdated(t *testing.T, e *engine.Engine, b bundle.Bundle) bundle.Report {
	t.Helper()
	report, err := e.CompareRenderings(t.Context(), b)
	if err != nil || report.State != bundle.StateApplying {
		t.Fatalf("got %+v and error %v, want the state Applying", report, err)
	}
	return report
}

// TestReleaseOfHelmIsRenderedAgain deploys a release of which helm has records. With the first rendering the engine
// changes nothing, also after a restart. It deploys the second one.
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
			b := asInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
			for i, status := range tc.statuses {
				c.putRecord(b.Items[0], i+1, status)
			}
			tc.want.Namespace, tc.want.Name = c.ns, "web"
			before := c.history()
			digest, err := b.Digest()
			if err != nil {
				t.Fatal(err)
			}
			m := &meter{}
			for range 2 { // the second engine is that of an agent that was killed
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
					t.Errorf("the engine made the request %s", line)
				}
			}
			c.wantHistory(before...)
			second := renderedAgain(b, tc.want.Revision, tc.want.IsUpgrade)
			if report := deploy(t, c.engine(nil), second); len(report.Outdated) > 0 {
				t.Errorf("got %v after the second rendering", report.Outdated)
			}
			c.wantHistory(tc.history...)
		})
	}
}

// TestSecondRenderingIsDeployed deploys a second rendering although helm has made another revision since the first one.
func TestSecondRenderingIsDeployed(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := asInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "1")))
	c.putRecord(b.Items[0], 1, common.StatusDeployed)
	if report := compareOutdated(t, c.engine(nil), b); len(report.Outdated) != 1 {
		t.Fatalf("got %+v, want an outdated release", report)
	}
	c.putRecord(b.Items[0], 2, common.StatusFailed)
	deploy(t, c.engine(nil), renderedAgain(b, 2, true))
	c.wantHistory("1 superseded", "2 failed", "3 deployed")
}

// TestReleaseOfHelmWithoutSecondRendering deploys the first rendering of a hub that does not render again, and of one
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
			b := asInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
			c.putRecord(b.Items[0], 1, common.StatusDeployed)
			change(&b)
			deploy(t, c.engine(nil), b)
			c.wantHistory("1 superseded", "2 deployed")
		})
	}
}

// TestOwnReleaseIsRenderedAgain delivers an upgrade as an installation, as a hub does that has lost its
// ConfigurationGroups. The second rendering is that of the deployed revision and makes no new one.
func TestOwnReleaseIsRenderedAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	first := asInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
	deploy(t, e, first)
	if report := converge(t, e, first); report.State != bundle.StateApplied {
		t.Errorf("the same again: got %+v", report)
	}
	second := rendered(asInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "revision 2"))), 2, true)
	second.Items[0].Release.Inputs = "changed"
	deploy(t, e, second)
	c.wantHistory("1 superseded", "2 deployed")
	lost := asInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "revision 1")))
	lost.Items[0].Release.Inputs = "changed"
	report := compareOutdated(t, e, lost)
	if diff := cmp.Diff([]bundle.OutdatedRelease{{Namespace: c.ns, Name: "web", Revision: 2, IsUpgrade: true}}, report.Outdated); diff != "" {
		t.Errorf("the outdated releases differ (-want +got):\n%s", diff)
	}
	deploy(t, e, renderedAgain(second, 2, true))
	c.wantHistory("1 superseded", "2 deployed")
}

// TestManualUpgradeIsNotOutdated upgrades a release with helm that is deployed. A change of another object of the
// bundle makes no new rendering.
func TestManualUpgradeIsNotOutdated(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := asInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
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

// TestReleaseIsComparedAfterTheHelmClient deploys two releases while helm installs the second one. The first one does
// not wait. The second one is rendered again when helm is done, and begins with no other bundle, in an agent that was
// restarted either.
func TestReleaseIsComparedAfterTheHelmClient(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		status common.Status
		want   bundle.OutdatedRelease // without a revision if the rendering is right
	}{
		"deployed": {status: common.StatusDeployed, want: bundle.OutdatedRelease{Revision: 2, IsUpgrade: true}},
		"failed":   {status: common.StatusFailed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			e := c.runEngine(t, nil).Engine
			b := asInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "1")))
			b.Items[0].Release.Revision = 2 // as the pending record demands
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
			c.delete(secrets, release.SecretName("web", 1)) // the rendering would be right again, but the hub has the report
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

// TestReportHasTheReleasesThatHaveNotBegun compares two releases, of which helm has deployed one.
func TestReportHasTheReleasesThatHaveNotBegun(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := asInstallation(c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1")))
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

// TestChangedReleaseIsRenderedAgain delivers a rendering that does not follow the records: a bundle that the hub has
// delivered before was never deployed, or a revision of helm has followed the own one.
func TestChangedReleaseIsRenderedAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := asInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "1")))
	wantOutdated := func(b bundle.Bundle, revision int, isUpgrade bool) {
		t.Helper()
		report := compareOutdated(t, e, b)
		want := []bundle.OutdatedRelease{{Namespace: c.ns, Name: "web", Revision: revision, IsUpgrade: isUpgrade}}
		if diff := cmp.Diff(want, report.Outdated); diff != "" {
			t.Errorf("the outdated releases differ (-want +got):\n%s", diff)
		}
	}
	wantOutdated(rendered(b, 2, true), 1, false)
	deploy(t, e, renderedAgain(b, 1, false))
	c.putRecord(b.Items[0], 2, common.StatusDeployed)
	changed := asInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "2")))
	changed.Items[0].Release.Inputs = "changed"
	wantOutdated(rendered(changed, 2, true), 3, true)
	deploy(t, e, rendered(changed, 3, true))
	c.wantHistory("1 superseded", "2 superseded", "3 deployed")

	// Without records the revision of the inventory counts.
	for i := range 3 {
		c.delete(secrets, release.SecretName("web", i+1))
	}
	last := asInstallation(c.chart(bundle.ReleaseOptions{MaxHistory: 5}, c.configMap("main", "3")))
	last.Items[0].Release.Inputs = "last"
	deploy(t, e, rendered(last, 4, true))
	c.wantHistory("4 deployed")
}
