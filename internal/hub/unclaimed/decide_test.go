package unclaimed

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
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
		"a summary asks for it":                     {evidence{summary: summary("", libv1beta1.PolicyRef{})}, claimed},
		"its summary asks for it no longer":         {evidence{summary: summary("")}, withdraw},
		"the same, and its controller knows":        {evidence{summary: summary(""), deployed: requested}, claimed},
		"the same, deployed once and for all":       {evidence{summary: summary(configv1beta1.SyncModeOneTime)}, claimed},
		"its summary is being deleted":              {evidence{summary: deleted}, claimed},
		"nothing is known":                          {evidence{profile: profileMissing}, keep},
		"a person orders it":                        {evidence{profile: profileMissing, ordered: true}, withdraw},
		"a person orders it, of another hub":        {evidence{deployed: foreign, profile: profileMissing, ordered: true}, withdraw},
		"a withdrawal has begun":                    {evidence{deployed: with(func(d *bundle.Deployed) { d.Removing = true }), profile: profileMissing}, withdraw},
		"another hub's withdrawal has begun":        {evidence{deployed: with(func(d *bundle.Deployed) { d.Removing, d.Hub = true, "them" }), profile: profileMissing}, keep},
		"its profile is being deleted":              {evidence{profile: profileDeleting}, withdraw},
		"its profile is about to make a summary":    {evidence{profile: profileMatches}, claimed},
		"its profile is paused":                     {evidence{profile: profileUndecided}, claimed},
		"another hub has a profile of that name":    {evidence{deployed: foreign, profile: profileUnmatched, listed: true}, keep},
		"the profile stopped matching":              {evidence{deployed: requested, profile: profileUnmatched}, withdraw},
		"the same in push mode":                     {evidence{profile: profileUnmatched, listed: true}, withdraw},
		"the same, by an earlier version":           {evidence{deployed: unknown, profile: profileUnmatched, listed: true}, withdraw},
		"the profile does not match, says a backup": {evidence{profile: profileUnmatched}, keep},
		"profile and summary were seen deleted":     {evidence{profile: profileMissing, seenDeleted: true}, withdraw},
		"the profile is missing, a group is there":  {evidence{deployed: requested, profile: profileMissing}, keep},
		"the profile is missing, and was deployed":  {evidence{profile: profileMissing, listed: true}, keep},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := tc.evidence
			if e.deployed.ID.Feature == "" {
				e.deployed = resources
			}
			e.hubUID = "us"
			if got := decide(e); got != tc.want {
				t.Errorf("decide() = %s, want %s", got, tc.want)
			}
		})
	}
}
