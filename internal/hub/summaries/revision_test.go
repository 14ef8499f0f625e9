package summaries_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/bundle"
)

func TestReleaseSeesItsRevision(t *testing.T) {
	t.Parallel()
	address := charts(t, with(`seen: "{{ .Release.Revision }} {{ .Release.IsInstall }} {{ .Release.IsUpgrade }} {{ .Values.message }}"`))
	hub := newHub(interceptor.Funcs{})
	r := requestFor("one", address)
	// deploy composes with these values, as a hub that was restarted, and remembers what the transport reports as deployed.
	deploy := func(values string) string {
		r.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = values
		made, err := newComposer(t, hub).Compose(t.Context(), r, libv1beta1.FeatureHelm)
		if err != nil {
			t.Fatal(err)
		}
		r.Deployed = made.Bundle.DeployedReleases()
		return field(t, made.Bundle.Items[0], "seen")
	}
	var got []string
	for _, values := range []string{"message: a", "message: a", "message: b", "message: b", "message: a"} {
		got = append(got, deploy(values))
	}
	if diff := cmp.Diff([]string{"1 true false a", "1 true false a", "2 false true b", "2 false true b", "3 false true a"}, got); diff != "" {
		t.Errorf("what templates see differs (-want +got):\n%s", diff)
	}
	r.Deployed = []bundle.DeployedRelease{{Namespace: "site", Name: "other"}}
	if got, want := deploy("message: c"), "1 true false c"; got != want {
		t.Errorf("with another release deployed: got %q, want %q", got, want)
	}
	r.Deployed = []bundle.DeployedRelease{{Namespace: "site", Name: "web"}}
	if got, want := deploy("message: c"), "2 false true c"; got != want {
		t.Errorf("with a former chart that did not look: got %q, want %q", got, want)
	}
}

func TestReleaseThatDoesNotLookHasNoRevision(t *testing.T) {
	t.Parallel()
	r := requestFor("one", charts(t, examples.Chart{}))
	r.Deployed = []bundle.DeployedRelease{{Namespace: "site", Name: "web", Inputs: "former", Revision: 4, IsUpgrade: true}}
	release := compose(t, newComposer(t, newHub(interceptor.Funcs{})), r).Release
	if release.Inputs != "" || release.Revision != 0 || release.IsUpgrade {
		t.Errorf("got %+v, want no inputs, revision and operation", release)
	}
}
