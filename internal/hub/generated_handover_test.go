package hub_test

import (
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/join"
)

// listGenerated lists the Secrets with generated values.
func (w *world) listGenerated() []corev1.Secret {
	w.Helper()
	var secrets corev1.SecretList
	w.must(w.List(w.Context(), &secrets, client.InNamespace(w.ns), client.MatchingFields{"type": "towline.dev/generated-values"}))
	return secrets.Items
}

// wantGenerated waits until there is this number of Secrets with generated values.
func (w *world) wantGenerated(want int) {
	w.Helper()
	w.eventually("generated values", func() error {
		if got := len(w.listGenerated()); got != want {
			return fmt.Errorf("got %d Secrets, want %d", got, want)
		}
		return nil
	})
}

// serveGeneratingChart serves a chart that generates a password. It returns a function that returns the change of a
// profile which deploys the chart with a message.
func (w *world) serveGeneratingChart() func(message string) func(*configv1beta1.ProfileSpec) {
	w.Helper()
	address := w.serveCharts(examples.Chart{Files: map[string]string{"templates/seen.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: seen}\n" +
		"data:\n  password: {{ randAlphaNum 20 }}\n  message: {{ .Values.message }}\n"}})
	return func(message string) func(*configv1beta1.ProfileSpec) {
		return deployChart(address, func(c *configv1beta1.HelmChart) { c.Values = "message: " + message + "\n" })
	}
}

func (w *world) deleteProfile(profile *configv1beta1.ClusterProfile) {
	w.Helper()
	w.must(w.Delete(w.Context(), profile))
	w.wantNoSummary(profile, "one")
}

func TestGeneratedValuesMoveWithTheRelease(t *testing.T) {
	w := newWorld(t)
	w.createReadyMember("one", w.prodLabels())
	release := w.serveGeneratingChart()
	first := w.createProfile(release("first"))
	password := w.wantSeen("one", "first", "")
	want := func(when, message string) {
		t.Helper()
		if got := w.wantSeen("one", message, ""); got != password {
			t.Errorf("%s: got password %q, want %q", when, got, password)
		}
		w.wantGenerated(1)
	}

	second := w.createProfile(release("second"))
	holder, err := w.getSummary(first, "one")
	w.must(err)
	w.wantFeature(second, "one", helm(libv1beta1.FeatureStatusFailedNonRetriable, "helm release hello/hello is managed by ClusterSummary "+holder.Name))
	w.deleteProfile(first)
	want("the next profile waited", "second")

	third := w.createProfile(func(s *configv1beta1.ProfileSpec) {
		release("third")(s)
		s.Tier = 50
	})
	w.wantFeature(third, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	update(w, second, func(p *configv1beta1.ClusterProfile) { p.Spec.HelmCharts[0].ReleaseName = "other" })
	w.wantFeature(second, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	w.wantGenerated(2)
	w.deleteProfile(second)
	want("the next profile took it over first", "third")
	update(w, third, func(p *configv1beta1.ClusterProfile) { release("fourth")(&p.Spec) })
	want("an upgrade after that", "fourth")

	update(w, third, func(p *configv1beta1.ClusterProfile) { p.Spec.StopMatchingBehavior = configv1beta1.LeavePolicies })
	w.wantFeature(third, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	w.deleteProfile(third)
	w.createProfile(release("fifth"))
	want("the release was left on the member", "fifth")
}

func TestGeneratedValuesAreDeletedWithTheRelease(t *testing.T) {
	w := newWorld(t)
	cluster := w.createReadyMember("one", w.prodLabels())
	release := w.serveGeneratingChart()
	profile := w.createProfile(release("first"))
	password := w.wantSeen("one", "first", "")
	w.wantGenerated(1)

	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Spec.HelmCharts[0].HelmChartAction = configv1beta1.HelmChartActionUninstall
	})
	w.wantGenerated(0)
	update(w, profile, func(p *configv1beta1.ClusterProfile) { release("second")(&p.Spec) })
	if got := w.wantSeen("one", "second", ""); got == password {
		t.Errorf("got password %q of the uninstalled release", got)
	}
	w.wantGenerated(1)
	w.createConfigMap("manifests", manifest("a"))
	update(w, profile, func(p *configv1beta1.ClusterProfile) {
		p.Spec.HelmCharts = nil
		p.Spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "manifests"}}
	})
	w.wantGenerated(0)
	update(w, profile, func(p *configv1beta1.ClusterProfile) { release("third")(&p.Spec) })
	w.wantSeen("one", "third", "")
	w.wantGenerated(1)
	w.deleteProfile(profile)
	w.wantGenerated(0)

	profile = w.createProfile(func(s *configv1beta1.ProfileSpec) {
		release("left")(s)
		s.StopMatchingBehavior = configv1beta1.LeavePolicies
	})
	w.wantSeen("one", "left", "")
	w.deleteProfile(profile)
	w.wantGenerated(1)
	leaving := w.deregister(join.DeregisterRequest{Request: join.Request{Name: "one"}})
	w.confirmAgentRemoval(cluster)
	leaving.wait(w)
	w.wantGenerated(0)
}

func TestDeletedGeneratedValuesAreGeneratedAgain(t *testing.T) {
	w := newWorld(t)
	w.createReadyMember("one", w.prodLabels())
	w.createProfile(w.serveGeneratingChart()("first"))
	password := w.wantSeen("one", "first", "")
	secret := w.listGenerated()[0]
	w.must(w.Delete(w.Context(), &secret))
	w.eventually("another password", func() error {
		data, err := w.readSeen("one")
		if err == nil && data["password"] == password {
			err = errors.New("the password has not changed")
		}
		return err
	})
	w.wantGenerated(1)
}
