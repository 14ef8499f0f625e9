package summaries

import (
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// TestReleaseWhoseNameCannotBeExpandedIsKept expands names in a sandbox whose processes do not start. A release that
// seems to be absent would be taken over by another profile, and its generated values would be deleted.
func TestReleaseWhoseNameCannotBeExpandedIsKept(t *testing.T) {
	t.Parallel()
	broken := source.Subject{Name: "one", Sandbox: sandbox.NewPool([]string{"/does/not/exist"}, clocktesting.NewFakePassiveClock(time.Unix(0, 0)))}
	templated := configv1beta1.HelmChart{ReleaseNamespace: "web", ReleaseName: "{{ .ClusterName }}-web"}
	manager, other := configv1beta1.ClusterSummary{}, configv1beta1.ClusterSummary{}
	manager.UID, other.UID = "manager", "other"
	manager.Spec.ClusterProfileSpec.HelmCharts = []configv1beta1.HelmChart{templated}
	manager.Status.HelmReleaseSummaries = []configv1beta1.HelmChartSummary{{ReleaseNamespace: "web", ReleaseName: "one-web", Status: configv1beta1.HelmChartStatusManaging}}
	other.Spec.ClusterProfileSpec.HelmCharts = []configv1beta1.HelmChart{{ReleaseNamespace: "web", ReleaseName: "one-web"}}

	all, err := resolveNames([]configv1beta1.ClusterSummary{manager, other}, broken)
	if err != nil {
		t.Fatal(err)
	}
	if lost := match.Lost(&all[1], all[:1]); len(lost) != 1 {
		t.Errorf("conflicts of the other summary: got %v, want one", lost)
	}
	if all, err := resolveNames([]configv1beta1.ClusterSummary{other, manager}, broken); err == nil {
		t.Errorf("the summary itself has the releases %v and no error", match.Installed(&all[1]))
	}
	invalid := configv1beta1.HelmChart{ReleaseNamespace: "web", ReleaseName: "{{ .NoField }}"}
	if charts, err := resolveCharts([]configv1beta1.HelmChart{invalid}, source.Subject{Name: "one"}); err != nil || len(charts) > 0 {
		t.Errorf("an invalid template: got %v, error %v; want neither", charts, err)
	}
}
