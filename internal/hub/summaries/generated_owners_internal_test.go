package summaries

import (
	"testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

// TestDroppedReleasesOnTheMemberAreNotUninstalled is about a summary whose charts are removed from its spec.
func TestDroppedReleasesOnTheMemberAreNotUninstalled(t *testing.T) {
	t.Parallel()
	const helm = libv1beta1.FeatureHelm
	deployed := map[libv1beta1.FeatureID]bundle.Deployed{helm: {Report: bundle.Report{State: bundle.StateApplied}}}
	tests := map[string]struct {
		mode     configv1beta1.SyncMode
		deployed map[libv1beta1.FeatureID]bundle.Deployed
		unlisted []libv1beta1.FeatureID
		want     bool
	}{
		"OneTime keeps the release":           {mode: configv1beta1.SyncModeOneTime, deployed: deployed},
		"the release is being uninstalled":    {mode: configv1beta1.SyncModeContinuous, deployed: deployed},
		"the release is uninstalled":          {mode: configv1beta1.SyncModeContinuous, deployed: deployed, unlisted: []libv1beta1.FeatureID{helm}, want: true},
		"OneTime, and nothing was deployed":   {mode: configv1beta1.SyncModeOneTime, want: true},
		"the release was uninstalled earlier": {mode: configv1beta1.SyncModeContinuous, want: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			summary := &configv1beta1.ClusterSummary{}
			summary.Spec.ClusterProfileSpec.SyncMode = tc.mode
			s := &state{summary: summary, deployed: tc.deployed, removedFeatures: tc.unlisted}
			if got := s.isUninstallComplete(); got != tc.want {
				t.Errorf("isUninstallComplete() is %t, want %t", got, tc.want)
			}
		})
	}
}
