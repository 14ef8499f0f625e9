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

func TestUnansweredLookupIsReportedOnce(t *testing.T) {
	t.Parallel()
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "profile-one"}}
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithObjects(summary).WithStatusSubresource(summary).Build()
	if err := hub.Get(t.Context(), client.ObjectKeyFromObject(summary), summary); err != nil {
		t.Fatal(err)
	}
	recorder := events.NewFakeRecorder(10)
	c := &Controller{Hub: hub, Events: recorder, Clock: clock.RealClock{}}
	s := &state{
		summary: summary, member: fleet.Member{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one"},
		compositions: []Composition{{
			Feature: libv1beta1.FeatureHelm, Digest: bundle.Digest{1}, Unanswered: []match.Release{{Namespace: "site", Name: "web"}},
		}},
	}
	for range 2 {
		if err := c.announce(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	if len(recorder.Events) != 1 {
		t.Fatalf("got %d events, want 1", len(recorder.Events))
	}
	if event := <-recorder.Events; !strings.Contains(event, "LookupUnanswered") || !strings.Contains(event, "release site/web") {
		t.Errorf("got event %q", event)
	}
}
