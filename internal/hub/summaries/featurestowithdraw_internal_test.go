package summaries

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

func TestFeaturesToWithdraw(t *testing.T) {
	t.Parallel()
	const resources, helm = libv1beta1.FeatureResources, libv1beta1.FeatureHelm
	policyRefs := configv1beta1.ProfileSpec{PolicyRefs: []libv1beta1.PolicyRef{{}}}
	oneTime := policyRefs
	oneTime.SyncMode = configv1beta1.SyncModeOneTime
	deployed := func(features ...libv1beta1.FeatureID) map[libv1beta1.FeatureID]bundle.Deployed {
		all := map[libv1beta1.FeatureID]bundle.Deployed{}
		for _, feature := range features {
			all[feature] = bundle.Deployed{Report: bundle.Report{State: bundle.StateApplied}}
		}
		return all
	}
	reported := func(status libv1beta1.FeatureStatus, features ...libv1beta1.FeatureID) configv1beta1.ClusterSummaryStatus {
		var s configv1beta1.ClusterSummaryStatus
		for _, feature := range features {
			s.FeatureSummaries = append(s.FeatureSummaries, configv1beta1.FeatureSummary{FeatureID: feature, Status: status})
		}
		return s
	}
	tests := map[string]struct {
		spec     configv1beta1.ProfileSpec
		status   configv1beta1.ClusterSummaryStatus
		deployed map[libv1beta1.FeatureID]bundle.Deployed
		deleting bool
		want     []libv1beta1.FeatureID
	}{
		"a wanted feature stays":                    {spec: policyRefs, deployed: deployed(resources)},
		"deployed and not wanted, without a status": {spec: policyRefs, deployed: deployed(resources, helm), want: []libv1beta1.FeatureID{helm}},
		"deployed and not wanted, with the status Removed": {
			spec: policyRefs, status: reported(libv1beta1.FeatureStatusRemoved, helm), deployed: deployed(helm), want: []libv1beta1.FeatureID{helm},
		},
		"only in the status": {spec: policyRefs, status: reported(libv1beta1.FeatureStatusFailed, helm), want: []libv1beta1.FeatureID{helm}},
		"removed":            {spec: policyRefs, status: reported(libv1beta1.FeatureStatusRemoved, helm)},
		"all features of a deleted summary": {
			spec: policyRefs, deployed: deployed(resources, helm), deleting: true, want: []libv1beta1.FeatureID{helm, resources},
		},
		"in the spec of a deleted summary, without a record": {spec: policyRefs, deleting: true, want: []libv1beta1.FeatureID{resources}},
		"deployed with syncMode OneTime":                     {spec: oneTime, status: reported(libv1beta1.FeatureStatusProvisioned, helm), deployed: deployed(helm)},
		"deployed with syncMode OneTime, of a deleted summary": {
			spec: oneTime, deployed: deployed(helm), deleting: true, want: []libv1beta1.FeatureID{helm, resources},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			summary := &configv1beta1.ClusterSummary{Spec: configv1beta1.ClusterSummarySpec{ClusterProfileSpec: tc.spec}, Status: tc.status}
			if tc.deleting {
				now := metav1.Now()
				summary.DeletionTimestamp = &now
			}
			s := &state{summary: summary, deployed: tc.deployed}
			if diff := cmp.Diff(tc.want, s.featuresToWithdraw()); diff != "" {
				t.Errorf("featuresToWithdraw() (-want +got):\n%s", diff)
			}
		})
	}
}
