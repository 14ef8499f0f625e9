package hub_test

import (
	"errors"
	"testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

func TestLabelsAndAnnotationsFollowTheProfile(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", manifest("a"))
	w.member("one", w.prod())
	profile := w.profile(nil)
	w.wantProvisioned(profile, "one")

	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Labels = map[string]string{"team": "x", libv1beta1.ServiceAccountNameLabel: "joe"} // without a namespace
		p.Annotations = map[string]string{"note": "n"}
	})
	w.eventually("refused by label", func() error {
		summary, err := w.summary(profile, "one")
		if err != nil {
			return err
		}
		return errors.Join(same("x", summary.Labels["team"]), same("n", summary.Annotations["note"]),
			same(libv1beta1.FeatureStatusFailedNonRetriable, summary.Status.FeatureSummaries[0].Status))
	})
	summary, err := w.summary(profile, "one")
	w.must(err)
	update(w, summary, func(s *configv1beta1.ClusterSummary) { s.Labels["mine"] = "too" })

	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Labels, p.Annotations = nil, nil })
	w.wantProvisioned(profile, "one")
	w.eventually("labels are gone", func() error {
		summary, err := w.summary(profile, "one")
		if err != nil {
			return err
		}
		return errors.Join(same("", summary.Labels["team"]), same("", summary.Annotations["note"]), same("too", summary.Labels["mine"]))
	})
}

// TestServiceAccountOfTheMember names in the labels of a profile the ServiceAccount as which its content is deployed.
func TestServiceAccountOfTheMember(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", manifest("a"))
	w.member("one", w.prod())
	profile := w.profile(nil)
	w.wantProvisioned(profile, "one")
	for _, test := range []struct{ name, namespace, want string }{{"tenant", "team", "team/tenant"}, {"other", "team", "team/other"}, {"", "", ""}} {
		update(w, profile, func(p *configv1beta1.ClusterProfile) {
			p.Labels = map[string]string{libv1beta1.ServiceAccountNameLabel: test.name, libv1beta1.ServiceAccountNamespaceLabel: test.namespace}
		})
		w.eventually("the bundle has another account", func() error { return same(test.want, w.account("one")) })
		w.wantProvisioned(profile, "one")
	}
}

func TestSwitchToOneTimeStopsHealing(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", manifest("a"))
	w.member("one", w.prod())
	profile := w.profile(nil)
	w.wantProvisioned(profile, "one")
	for _, mode := range []configv1beta1.SyncMode{configv1beta1.SyncModeOneTime, configv1beta1.SyncModeContinuous} {
		update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.SyncMode = mode })
		w.eventually("the member hears of "+string(mode), func() error {
			return same(mode == configv1beta1.SyncModeContinuous, w.correctsDrift("one"))
		})
		w.wantProvisioned(profile, "one")
	}
}

// account returns the ServiceAccount of the bundle on a member. The test must have one profile.
func (b *fakeTransport) account(member string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, has := range b.has {
		if key == member+" "+has.ID.String() {
			return has.Options.ServiceAccount
		}
	}
	return ""
}

// correctsDrift returns CorrectDrift of the bundle on a member. The test must have one profile.
func (b *fakeTransport) correctsDrift(member string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, has := range b.has {
		if key == member+" "+has.ID.String() {
			return has.Options.CorrectDrift
		}
	}
	return false
}
