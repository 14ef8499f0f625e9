package summaries

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
)

// TestStartOfDeployment has a pull member. The status of its summary does not show the start.
func TestStartOfDeployment(t *testing.T) {
	t.Parallel()
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "profile-one"}}
	var started []libv1beta1.FeatureID
	c := &Controller{OnDeliveryStart: func(_ client.ObjectKey, feature libv1beta1.FeatureID) { started = append(started, feature) }}
	s := newState(summary, nil, fleet.Member{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one", Mode: fleet.Pull})
	delivered := bundle.Digest{1}
	s.summary.Status.FeatureSummaries = []configv1beta1.FeatureSummary{{
		FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusProvisioned, Hash: s.result.HashKey.HashOf(delivered),
	}}
	s.compositions = []Composition{{Feature: libv1beta1.FeatureResources, Digest: delivered}, {Feature: libv1beta1.FeatureHelm, Digest: delivered}}
	if err := c.reportStart(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if len(started) != 1 || started[0] != libv1beta1.FeatureHelm {
		t.Errorf("started: got %v, want only the feature that is new", started)
	}
}

func TestUnansweredLookupIsReportedOnce(t *testing.T) {
	t.Parallel()
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "profile-one"}}
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithObjects(summary).WithStatusSubresource(summary).Build()
	if err := hub.Get(t.Context(), client.ObjectKeyFromObject(summary), summary); err != nil {
		t.Fatal(err)
	}
	recorder := events.NewFakeRecorder(10)
	c := &Controller{Hub: hub, Events: recorder, Clock: clock.RealClock{}, normalEvents: newEventLimiter()}
	s := newState(summary, nil, fleet.Member{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one"})
	for i, step := range []struct {
		version string
		digest  bundle.Digest
		want    int
	}{
		{version: "1.0.0", digest: bundle.Digest{1}, want: 1},
		{version: "1.0.0", digest: bundle.Digest{1}},
		{version: "1.0.0", digest: bundle.Digest{2}}, // other values
		{version: "2.0.0", digest: bundle.Digest{3}, want: 1},
	} {
		s.compositions = []Composition{{
			Feature: libv1beta1.FeatureHelm, Digest: step.digest, UnansweredLookups: []match.Release{{Namespace: "site", Name: "web"}},
			Releases: []configv1beta1.HelmChartSummary{{
				ReleaseNamespace: "site", ReleaseName: "web", ChartName: "hello", ChartVersion: step.version, Status: configv1beta1.HelmChartStatusManaging,
			}},
		}}
		if err := c.reportStart(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if got := len(recorder.Events); got != step.want {
			t.Fatalf("step %d: got %d events, want %d", i, got, step.want)
		}
		for range step.want {
			if event := <-recorder.Events; !strings.Contains(event, "LookupUnanswered") || !strings.Contains(event, "release site/web") {
				t.Errorf("step %d: got event %q", i, event)
			}
		}
	}
}
