package deliver

import (
	"context"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

func TestDeployedListsHelmReleases(t *testing.T) {
	t.Parallel()
	b := testBundle(
		bundle.Item{Release: &bundle.Release{Namespace: "a", Name: "looks", ChartVersion: "1.0.0", Inputs: "x", Revision: 3, IsUpgrade: true}},
		bundle.Item{Release: &bundle.Release{Namespace: "b", Name: "plain", Data: bundle.ReleaseData{Notes: "long"}}},
		bundle.Item{Reference: bundle.Reference{Kind: "ConfigMap", Name: "c"}},
	)
	b.Items[0].Release.IsUnconfirmed = true
	group, bundles := pack(t, b)
	want := []bundle.DeployedRelease{
		{Namespace: "a", Name: "looks", Inputs: "x", Revision: 3, IsUpgrade: true, IsUnconfirmed: true},
		{Namespace: "b", Name: "plain"},
	}
	if deployed, ok := deployedOf(group); !ok || cmp.Diff(want, deployed.Releases) != "" {
		t.Errorf("got %t and %+v, want %+v", ok, deployed.Releases, want)
	}
	if got, err := unpack(group, bundles); err != nil || cmp.Diff(b, got) != "" {
		t.Errorf("the agent gets another bundle: %v\n%s", err, cmp.Diff(b, got))
	}
	removal := removeGroup(fleet.Member{Namespace: "eu", Name: "eu-1"}, bundle.Withdrawal{ID: b.ID}, group)
	if deployed, _ := deployedOf(removal); deployed.Releases != nil {
		t.Errorf("of a removal: got %+v, want none", deployed.Releases)
	}
	foreign := &libv1beta1.ConfigurationGroup{}
	if deployed, _ := deployedOf(foreign); deployed.Releases != nil {
		t.Errorf("of another hub: got %+v, want none", deployed.Releases)
	}
}

// TestInvalidNamesAreNotListed lists bundles with names from the member. The hub uses the names of summaries in a
// command that it proposes.
func TestInvalidNamesAreNotListed(t *testing.T) {
	t.Parallel()
	engine := newMemberEngine()
	want := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "web.a-b", Feature: "Helm"}
	local := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "Sveltos/eu/eu-1/web", Feature: "Helm"}
	for _, id := range []bundle.ID{
		want, local, {RequestorKind: "ClusterSummary", RequestorName: "a; rm -rf /", Feature: "Helm"}, {RequestorKind: "ClusterSummary", RequestorName: "a$(b)", Feature: "Helm"},
		{RequestorKind: "ClusterSummary", RequestorName: "--all", Feature: "Helm"}, {RequestorKind: "ClusterSummary", RequestorName: "../a", Feature: "Helm"},
		{RequestorKind: "ClusterSummary", RequestorName: "a\nb", Feature: "Helm"}, {RequestorKind: "ClusterSummary", RequestorName: "web", Feature: "He lm"},
		{RequestorKind: "a b", RequestorName: "web", Feature: "Helm"}, {RequestorKind: "ClusterSummary", Feature: "Helm"},
	} {
		engine.records[id] = bundle.Bundle{ID: id}
	}
	push := &PushTransport{Engines: func(context.Context, fleet.Member) (Engine, error) { return engine, nil }}
	all, err := push.ListDeployed(t.Context(), fleet.Member{})
	slices.SortFunc(all, compareDeployed)
	if err != nil || len(all) != 2 || all[0].ID != local || all[1].ID != want {
		t.Errorf("got %+v, %v, want only %s and %s", all, err, local, want)
	}
}

// TestOutdatedReleasesAreOfTheCurrentGroup reports outdated releases of a group. They are not listed any more after a
// newer bundle or a newer report.
func TestOutdatedReleasesAreOfTheCurrentGroup(t *testing.T) {
	t.Parallel()
	group, _ := pack(t, testBundle(bundle.Item{Release: &bundle.Release{Namespace: "a", Name: "adopted", Inputs: "x", Revision: 1}}))
	outdated := []bundle.OutdatedRelease{{Namespace: "a", Name: "adopted", Revision: 3, IsUpgrade: true}}
	group.Status = statusFor(group, group.Status, bundle.Report{State: bundle.StateApplying, Outdated: outdated})
	if deployed, _ := deployedOf(group); cmp.Diff(outdated, deployed.Report.Outdated) != "" {
		t.Errorf("got %+v, want %+v", deployed.Report.Outdated, outdated)
	}
	newer := group.DeepCopy()
	newer.Spec.RequestorHash = sum([]byte("rendered again"))
	done := group.DeepCopy()
	done.Status.DeploymentStatus = libv1beta1.FeatureStatusProvisioned
	if deployed, _ := deployedOf(done); deployed.Report.Outdated != nil {
		t.Errorf("of an applied bundle: got %+v, want none", deployed.Report.Outdated)
	}
	if deployed, _ := deployedOf(newer); deployed.Report.Outdated != nil {
		t.Errorf("of a newer bundle: got %+v, want none", deployed.Report.Outdated)
	}
	newer.Status = statusFor(newer, newer.Status, bundle.Report{State: bundle.StateApplying})
	if got := newer.Status.OutdatedReleases; got != nil {
		t.Errorf("after the next report: got %+v, want none", got)
	}
}
