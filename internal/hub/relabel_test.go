package hub_test

import (
	"errors"
	"testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

func TestLabelsAndAnnotationsFollowTheProfile(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")

	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Labels = map[string]string{"team": "x", libv1beta1.ServiceAccountNameLabel: "joe"} // without a namespace
		p.Annotations = map[string]string{"note": "n"}
	})
	w.eventually("refused by label", func() error {
		summary, err := w.getSummary(profile, "one")
		if err != nil {
			return err
		}
		return errors.Join(checkEqual("x", summary.Labels["team"]), checkEqual("n", summary.Annotations["note"]),
			checkEqual(libv1beta1.FeatureStatusFailedNonRetriable, summary.Status.FeatureSummaries[0].Status))
	})
	summary, err := w.getSummary(profile, "one")
	w.must(err)
	update(w, summary, func(s *configv1beta1.ClusterSummary) { s.Labels["mine"] = "too" })

	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Labels, p.Annotations = nil, nil })
	w.wantProvisioned(profile, "one")
	w.eventually("deletion of the labels", func() error {
		summary, err := w.getSummary(profile, "one")
		if err != nil {
			return err
		}
		return errors.Join(checkEqual("", summary.Labels["team"]), checkEqual("", summary.Annotations["note"]), checkEqual("too", summary.Labels["mine"]))
	})
}

// TestServiceAccountOfTheMember names in the labels of a profile the ServiceAccount as which its content is deployed.
func TestServiceAccountOfTheMember(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	for _, test := range []struct{ name, namespace, want string }{{"tenant", "team", "team/tenant"}, {"other", "team", "team/other"}, {"", "", ""}} {
		update(w, profile, func(p *configv1beta1.ClusterProfile) {
			p.Labels = map[string]string{libv1beta1.ServiceAccountNameLabel: test.name, libv1beta1.ServiceAccountNamespaceLabel: test.namespace}
		})
		w.eventually("the bundle has another account", func() error { return checkEqual(test.want, w.serviceAccountOf("one")) })
		w.wantProvisioned(profile, "one")
	}
}

func TestSwitchToOneTimeStopsDriftCorrection(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	for _, mode := range []configv1beta1.SyncMode{configv1beta1.SyncModeOneTime, configv1beta1.SyncModeContinuous} {
		update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.SyncMode = mode })
		w.eventually("delivery of the mode "+string(mode), func() error {
			return checkEqual(mode == configv1beta1.SyncModeContinuous, w.correctsDrift("one"))
		})
		w.wantProvisioned(profile, "one")
	}
}

// serviceAccountOf returns the ServiceAccount of the bundle on a member. The test must have one profile.
func (b *fakeTransport) serviceAccountOf(member string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, found := range b.deployed {
		if key == member+" "+found.ID.String() {
			return found.Options.ServiceAccount
		}
	}
	return ""
}

// correctsDrift returns CorrectDrift of the bundle on a member. The test must have one profile.
func (b *fakeTransport) correctsDrift(member string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, found := range b.deployed {
		if key == member+" "+found.ID.String() {
			return found.Options.CorrectDrift
		}
	}
	return false
}
