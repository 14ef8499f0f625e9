package unclaimed

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

func TestDecide(t *testing.T) {
	t.Parallel()
	resources := bundle.Deployed{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "web", Feature: "Resources"}, Hub: "us"}
	with := func(change func(*bundle.Deployed)) bundle.Deployed { d := resources; change(&d); return d }
	requested := with(func(d *bundle.Deployed) { d.Requested = true })
	foreign := with(func(d *bundle.Deployed) { d.Hub = "them" })
	unknown := with(func(d *bundle.Deployed) { d.Hub = "" })
	summary := func(mode configv1beta1.SyncMode, refs ...libv1beta1.PolicyRef) *configv1beta1.ClusterSummary {
		return &configv1beta1.ClusterSummary{Spec: configv1beta1.ClusterSummarySpec{ClusterProfileSpec: configv1beta1.ProfileSpec{SyncMode: mode, PolicyRefs: refs}}}
	}
	deleted := summary("")
	deleted.DeletionTimestamp = &metav1.Time{}
	*deleted.DeletionTimestamp = metav1.Now()
	tests := map[string]struct {
		evidence evidence
		want     decision
	}{
		"summary has the feature":                               {evidence{summary: summary("", libv1beta1.PolicyRef{})}, claimed},
		"summary no longer has the feature":                     {evidence{summary: summary("")}, withdraw},
		"summary no longer has the feature, bundle has a group": {evidence{summary: summary(""), deployed: locatedBundle{Deployed: requested}}, claimed},
		"summary no longer has the feature, OneTime":            {evidence{summary: summary(configv1beta1.SyncModeOneTime)}, claimed},
		"summary has the feature for the member only": {evidence{
			summary: summary("", libv1beta1.PolicyRef{}), deployed: locatedBundle{Deployed: resources, location: fleet.Member{Mode: fleet.Local}},
		}, withdraw},
		"summary has the feature for the hub": {evidence{
			summary:  summary("", libv1beta1.PolicyRef{DeploymentType: libv1beta1.DeploymentTypeLocal}),
			deployed: locatedBundle{Deployed: resources, location: fleet.Member{Mode: fleet.Local}},
		}, claimed},
		"summary is being deleted":                                      {evidence{summary: deleted}, claimed},
		"summary of this hub lacks the feature of another hub's bundle": {evidence{summary: summary(""), deployed: locatedBundle{Deployed: foreign}}, keep},
		"the same, and the user requests withdrawal":                    {evidence{summary: summary(""), deployed: locatedBundle{Deployed: foreign}, withdrawRequested: true}, withdraw},
		"no evidence":              {evidence{profile: profileMissing}, keep},
		"user requests withdrawal": {evidence{profile: profileMissing, withdrawRequested: true}, withdraw},
		"user requests withdrawal, bundle of another hub": {evidence{deployed: locatedBundle{Deployed: foreign}, profile: profileMissing, withdrawRequested: true}, withdraw},
		"withdrawal has started":                          {evidence{deployed: locatedBundle{Deployed: with(func(d *bundle.Deployed) { d.Removing = true })}, profile: profileMissing}, withdraw},
		"withdrawal by another hub has started":           {evidence{deployed: locatedBundle{Deployed: with(func(d *bundle.Deployed) { d.Removing, d.Hub = true, "them" })}, profile: profileMissing}, keep},
		"profile is being deleted":                        {evidence{profile: profileDeleting}, withdraw},
		"profile matches, no summary yet":                 {evidence{profile: profileMatches}, claimed},
		"profile is paused":                               {evidence{profile: profileUndecided}, claimed},
		"another hub's profile has the same name":         {evidence{deployed: locatedBundle{Deployed: foreign}, profile: profileUnmatched, isListed: true}, keep},
		"profile no longer matches, pull mode":            {evidence{deployed: locatedBundle{Deployed: requested}, profile: profileUnmatched}, withdraw},
		"profile no longer matches, push mode":            {evidence{profile: profileUnmatched, isListed: true}, withdraw},
		"profile no longer matches, unknown hub":          {evidence{deployed: locatedBundle{Deployed: unknown}, profile: profileUnmatched, isListed: true}, withdraw},
		"profile does not match, hub may be a backup":     {evidence{profile: profileUnmatched}, keep},
		"deletion of profile and summary was seen":        {evidence{profile: profileMissing, seenDeleted: true}, withdraw},
		"profile is missing, bundle has a group":          {evidence{deployed: locatedBundle{Deployed: requested}, profile: profileMissing}, keep},
		"profile is missing, bundle is listed":            {evidence{profile: profileMissing, isListed: true}, keep},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := tc.evidence
			if e.deployed.ID.Feature == "" {
				e.deployed.Deployed = resources
			}
			e.hubUID = "us"
			if got := decide(e); got != tc.want {
				t.Errorf("decide() = %s, want %s", got, tc.want)
			}
		})
	}
}
