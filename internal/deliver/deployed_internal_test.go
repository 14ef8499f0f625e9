package deliver

import (
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
	group, bundles := pack(t, b)
	want := []bundle.DeployedRelease{
		{Namespace: "a", Name: "looks", Inputs: "x", Revision: 3, IsUpgrade: true},
		{Namespace: "b", Name: "plain"},
	}
	if deployed, ok := deployedBy(group); !ok || cmp.Diff(want, deployed.Releases) != "" {
		t.Errorf("got %t and %+v, want %+v", ok, deployed.Releases, want)
	}
	if got, err := unpack(group, bundles); err != nil || cmp.Diff(b, got) != "" {
		t.Errorf("the agent does not get the bundle: %v\n%s", err, cmp.Diff(b, got))
	}
	removal := removeGroup(fleet.Member{Namespace: "eu", Name: "eu-1"}, bundle.Withdrawal{ID: b.ID}, group)
	if deployed, _ := deployedBy(removal); deployed.Releases != nil {
		t.Errorf("of a removal: got %+v, want none", deployed.Releases)
	}
	foreign := &libv1beta1.ConfigurationGroup{}
	if deployed, _ := deployedBy(foreign); deployed.Releases != nil {
		t.Errorf("of another hub: got %+v, want none", deployed.Releases)
	}
}
