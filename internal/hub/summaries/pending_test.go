package summaries_test

import (
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/hub/summaries"
)

// pulled is a release of the chart managing on a pull member.
type pulled struct {
	hub     client.Client
	request summaries.ComposeRequest
}

func newPulled(t *testing.T) *pulled {
	t.Helper()
	return &pulled{hub: newHub(interceptor.Funcs{}), request: requestFor("one", charts(t, managing()))}
}

// deliver composes the release with a message, as a hub that was restarted, and delivers it.
func (p *pulled) deliver(t *testing.T, message string) (bundle.Item, error) {
	t.Helper()
	p.request.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = "message: " + message + "\n"
	made, err := newComposer(t, p.hub).Compose(t.Context(), p.request, libv1beta1.FeatureHelm)
	if err != nil {
		return bundle.Item{}, err
	}
	p.request.Deployed, p.request.State, p.request.Outdated = made.Bundle.DeployedReleases(), bundle.StatePending, nil
	return made.Bundle.Items[0], nil
}

// deploy delivers the release. The member reports it as applied, and the hub composes it again. It must find an object
// with these texts.
func (p *pulled) deploy(t *testing.T, message, found string) bundle.Item {
	t.Helper()
	for _, state := range []bundle.State{p.request.State, bundle.StateApplied} {
		p.request.State = state
		item, err := p.deliver(t, message)
		if err != nil {
			t.Fatalf("%s: %v", message, err)
		}
		if got := field(t, item, "found"); got != found {
			t.Errorf("%s: found %q, want %q", message, got, found)
		}
	}
	p.request.State = bundle.StateApplied
	item, err := p.deliver(t, message)
	if err != nil {
		t.Fatalf("%s: %v", message, err)
	}
	p.request.State = bundle.StateApplied
	return item
}

// rejectAs makes the member report the delivered rendering as outdated.
func (p *pulled) rejectAs(revision int, isUpgrade bool) {
	p.request.State = bundle.StateApplying
	p.request.Outdated = []bundle.OutdatedRelease{{Namespace: "site", Name: "web", Revision: revision, IsUpgrade: isUpgrade}}
}

// TestLookupDoesNotFindARejectedRendering delivers an installation to a member on which helm has deployed the release,
// with another password. The generated one was never deployed.
func TestLookupDoesNotFindARejectedRendering(t *testing.T) {
	t.Parallel()
	p := newPulled(t)
	if _, err := p.deliver(t, "first"); err != nil {
		t.Fatal(err)
	}
	for _, message := range []string{"first", "second", "third"} {
		p.rejectAs(3, true)
		if _, err := p.deliver(t, message); err == nil || !strings.Contains(err.Error(), "PASSWORDS ERROR") {
			t.Errorf("%s: got error %v, want that of the chart", message, err)
		}
	}
}

// TestLookupDoesNotFindARenderingThatHasNotBegun changes the values before the member has read the first bundle. If
// helm has deployed the release once, the rendering of an upgrade to revision 2 would be deployed.
func TestLookupDoesNotFindARenderingThatHasNotBegun(t *testing.T) {
	t.Parallel()
	for _, state := range []bundle.State{bundle.StatePending, bundle.StateMissing} {
		p := newPulled(t)
		for _, message := range []string{"first", "second"} {
			item, err := p.deliver(t, message)
			if err != nil {
				t.Fatalf("%s: %v", message, err)
			}
			if got := field(t, item, "found"); got != "- -" || item.Release.IsUpgrade || item.Release.Revision != 1 {
				t.Errorf("%s: found %q in revision %d, want the first installation", message, got, item.Release.Revision)
			}
			p.request.State = state
		}
	}
}

// TestLookupDoesNotFindAReleaseThatHasNotBegun changes the values while the member waits for another release of the
// bundle to be rendered again. It has not compared the release yet.
func TestLookupDoesNotFindAReleaseThatHasNotBegun(t *testing.T) {
	t.Parallel()
	p := newPulled(t)
	for _, message := range []string{"first", "second"} {
		item, err := p.deliver(t, message)
		if err != nil {
			t.Fatalf("%s: %v", message, err)
		}
		if got := field(t, item, "found"); got != "- -" || item.Release.IsUpgrade || item.Release.Revision != 1 || !item.Release.IsUnconfirmed {
			t.Errorf("%s: found %q in revision %d, want the first installation, unconfirmed", message, got, item.Release.Revision)
		}
		p.request.State = bundle.StateApplying
		p.request.Outdated = []bundle.OutdatedRelease{{Namespace: "site", Name: "other", Revision: 2, IsUpgrade: true}, {Namespace: "site", Name: "web"}}
	}
}

// TestLookupFindsARenderingThatHasBegun changes the values while the release is deployed, or fails.
func TestLookupFindsARenderingThatHasBegun(t *testing.T) {
	t.Parallel()
	for _, state := range []bundle.State{bundle.StateApplying, bundle.StateFailed, bundle.StateApplied} {
		p := newPulled(t)
		first, err := p.deliver(t, "first")
		if err != nil {
			t.Fatal(err)
		}
		p.request.State = state
		second, err := p.deliver(t, "second")
		if err != nil {
			t.Fatalf("%s: %v", state, err)
		}
		if got, want := field(t, second, "found"), foundText("first", ownPassword(t, first)); got != want {
			t.Errorf("%s: found %q, want %q", state, got, want)
		}
	}
}

// TestLookupFindsTheDeployedRendering rejects an upgrade. The second rendering must find the objects of the revision
// before it.
func TestLookupFindsTheDeployedRendering(t *testing.T) {
	t.Parallel()
	for _, message := range []string{"second", "third"} {
		p := newPulled(t)
		want := foundText("first", ownPassword(t, p.deploy(t, "first", "- -")))
		if _, err := p.deliver(t, "second"); err != nil {
			t.Fatal(err)
		}
		p.rejectAs(5, true)
		p.deploy(t, message, want)
	}
}

// TestLookupFindsOrphanedObjects deploys a release that LeavePolicies orphaned on the member, with the same values. The
// release was only installed, or also upgraded.
func TestLookupFindsOrphanedObjects(t *testing.T) {
	t.Parallel()
	p := newPulled(t)
	password := ownPassword(t, p.deploy(t, "first", "- -"))
	leave := func() { p.request.Deployed, p.request.State = nil, "" }
	leave()
	if _, err := p.deliver(t, "first"); err != nil {
		t.Fatal(err)
	}
	p.rejectAs(2, true)
	p.deploy(t, "first", foundText("first", password))
	p.deploy(t, "second", foundText("first", password))
	leave()
	if _, err := p.deliver(t, "third"); err != nil {
		t.Fatal(err)
	}
	p.rejectAs(4, true)
	p.deploy(t, "third", foundText("second", password))
}

// TestLostGroupDoesNotChangeTheRendering loses the ConfigurationGroup of an upgrade. The member requires the same
// rendering again.
func TestLostGroupDoesNotChangeTheRendering(t *testing.T) {
	t.Parallel()
	p := newPulled(t)
	found := foundText("first", ownPassword(t, p.deploy(t, "first", "- -")))
	p.deploy(t, "second", found)
	p.request.Deployed, p.request.State = nil, ""
	if _, err := p.deliver(t, "second"); err != nil {
		t.Fatal(err)
	}
	p.rejectAs(2, true)
	p.deploy(t, "second", found)
}
