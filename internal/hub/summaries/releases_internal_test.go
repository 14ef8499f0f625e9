package summaries

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// TestReleaseWhoseNameCannotBeExpandedIsKept expands names in a sandbox whose processes do not start. A release that
// seems to be absent would be taken over by another profile, and its generated values would be deleted.
func TestReleaseWhoseNameCannotBeExpandedIsKept(t *testing.T) {
	t.Parallel()
	broken := func(*configv1beta1.ClusterSummary) (source.TemplateContext, error) {
		return source.TemplateContext{Name: "one", Sandbox: sandbox.NewPool([]string{"/does/not/exist"}, clocktesting.NewFakePassiveClock(time.Unix(0, 0)))}, nil
	}
	templated := configv1beta1.HelmChart{ReleaseNamespace: "web", ReleaseName: "{{ .ClusterName }}-web"}
	manager, other := configv1beta1.ClusterSummary{}, configv1beta1.ClusterSummary{}
	manager.UID, other.UID = "manager", "other"
	manager.Spec.ClusterProfileSpec.HelmCharts = []configv1beta1.HelmChart{templated}
	manager.Status.HelmReleaseSummaries = []configv1beta1.HelmChartSummary{{ReleaseNamespace: "web", ReleaseName: "one-web", Status: configv1beta1.HelmChartStatusManaging}}
	other.Spec.ClusterProfileSpec.HelmCharts = []configv1beta1.HelmChart{{ReleaseNamespace: "web", ReleaseName: "one-web"}}

	all, isPartial, err := expandReleaseNames([]configv1beta1.ClusterSummary{manager, other}, broken)
	if err != nil || !isPartial {
		t.Fatalf("isPartial is %t, error %v; want a partial result", isPartial, err)
	}
	if conflicts := match.FindConflicts(&all[1], all[:1]); len(conflicts) != 1 {
		t.Errorf("conflicts of the other summary: got %v, want one", conflicts)
	}
	if all, _, err := expandReleaseNames([]configv1beta1.ClusterSummary{other, manager}, broken); err == nil {
		t.Errorf("the summary itself has the releases %v and no error", match.WantedReleases(&all[1]))
	}
	deleted := manager
	deleted.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	if all, _, err := expandReleaseNames([]configv1beta1.ClusterSummary{other, deleted}, broken); err != nil || len(match.WantedReleases(&all[1])) != 1 {
		t.Errorf("a summary that is being deleted: got %v, error %v; want the release in its status", all, err)
	}
	manager.Spec.ClusterProfileSpec.HelmCharts[0].ReleaseName = "{{ .NoField }}"
	working := func(*configv1beta1.ClusterSummary) (source.TemplateContext, error) {
		return source.TemplateContext{Name: "one"}, nil
	}
	all, isPartial, err = expandReleaseNames([]configv1beta1.ClusterSummary{manager, other}, working)
	if err != nil || isPartial || len(match.FindConflicts(&all[1], all[:1])) != 1 {
		t.Errorf("an invalid template of a manager: got %v, %t, error %v; want its release to stay", all, isPartial, err)
	}
	invalid := configv1beta1.HelmChart{ReleaseNamespace: "web", ReleaseName: "{{ .NoField }}"}
	if charts, err := expandChartNames([]configv1beta1.HelmChart{invalid}, source.TemplateContext{Name: "one"}); err != nil || len(charts) > 0 {
		t.Errorf("an invalid template: got %v, error %v; want neither", charts, err)
	}
}

// summaryClient reads the summaries of one cluster.
type summaryClient struct {
	client.Client

	summaries []configv1beta1.ClusterSummary
	// onList gets the items of each list. It may be nil.
	onList func(items []configv1beta1.ClusterSummary)
}

// Get returns an empty object.
func (summaryClient) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return nil
}

// List lists the summaries. As with other clients, the caller owns the slice.
func (c summaryClient) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	items := slices.Clone(c.summaries)
	if c.onList != nil {
		c.onList(items)
	}
	list.(*configv1beta1.ClusterSummaryList).Items = items
	return nil
}

// TestListedSummariesAreNotCopied compares the summaries of a cluster with the items of the list. They would be copied
// for each summary of the cluster.
func TestListedSummariesAreNotCopied(t *testing.T) {
	t.Parallel()
	all := []configv1beta1.ClusterSummary{{}, {}, {}}
	for i := range all {
		all[i].Spec.ClusterProfileSpec.HelmCharts = []configv1beta1.HelmChart{{ReleaseNamespace: "web", ReleaseName: "web"}}
	}
	var listed []configv1beta1.ClusterSummary
	c := &Controller{Hub: summaryClient{summaries: all, onList: func(items []configv1beta1.ClusterSummary) { listed = items }}}
	got, err := c.loadClusterSummaries(t.Context(), &all[0])
	if err != nil {
		t.Fatal(err)
	}
	if len(got.all) != len(all) || &got.all[0] != &listed[0] {
		t.Errorf("got %d copies, want the %d summaries of the list", len(got.all), len(all))
	}
	if got.summary == &all[0] {
		t.Error("the summary is not a copy, and its releases are replaced")
	}
}

// TestSummariesWithSameReleaseAreFoundWithoutTheSandbox has a sandbox that writes a file when it starts a process.
func TestSummariesWithSameReleaseAreFoundWithoutTheSandbox(t *testing.T) {
	t.Parallel()
	started := filepath.Join(t.TempDir(), "started")
	pool := sandbox.NewPool([]string{"/bin/sh", "-c", "echo >" + started}, clocktesting.NewFakePassiveClock(time.Unix(0, 0)))
	summary := func(name string, releases ...string) configv1beta1.ClusterSummary {
		s := configv1beta1.ClusterSummary{Spec: configv1beta1.ClusterSummarySpec{ClusterNamespace: "eu", ClusterName: "one", ClusterType: libv1beta1.ClusterTypeSveltos}}
		s.Name = name
		for _, release := range releases {
			s.Spec.ClusterProfileSpec.HelmCharts = append(s.Spec.ClusterProfileSpec.HelmCharts, configv1beta1.HelmChart{ReleaseName: release})
		}
		return s
	}
	all := []configv1beta1.ClusterSummary{summary("none"), summary("web", "web"), summary("web-too", "db", "web"), summary("other", "other"), summary("template", "{{ .ClusterName }}")}
	c := &Controller{Hub: summaryClient{summaries: all}, Composer: &Composer{Sandbox: pool}}
	for i, want := range [][]string{nil, {"web-too", "template"}, {"web", "template"}, {"template"}, {"web", "web-too", "other"}} {
		var got []string
		for _, req := range c.summariesWithSameRelease(t.Context(), &all[i]) {
			got = append(got, req.Name)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("for %s (-want +got):\n%s", all[i].Name, diff)
		}
	}
	if _, err := os.Stat(started); err == nil {
		t.Error("the sandbox has started a process")
	}
}
