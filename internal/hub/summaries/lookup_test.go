package summaries_test

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
)

// cluster serves Secret site/there with a password, which a test may change, as the API server of a member does.
func cluster(t *testing.T, password *string) *rest.Config {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch r.URL.Path {
		case "/api/v1":
			_, _ = io.WriteString(w, `{"kind": "APIResourceList", "groupVersion": "v1", "resources": [{"name": "secrets", "kind": "Secret", "namespaced": true}]}`)
		case "/api/v1/namespaces/site/secrets/there":
			_, _ = io.WriteString(w, `{"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "there"}, "data": {"password": "`+*password+`"}}`)
		default:
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}`)
		}
	}))
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL}
}

func TestLookupReadsPushMembersOnly(t *testing.T) {
	t.Parallel()
	address := charts(t, with(`there: "{{ (lookup "v1" "Secret" "site" "there").data | default dict | values | join "" }}",`+
		` missing: "{{ lookup "v1" "Secret" "site" "missing" | len }}"`))
	first, second := "Zmlyc3Q=", "c2Vjb25k"
	clusters := map[string]*rest.Config{"one": cluster(t, &first), "two": cluster(t, &second)}
	composer := newComposer(t, newHub(interceptor.Funcs{}))
	composer.Dial = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
		fleet.Push: func(_ context.Context, m fleet.Member) (*rest.Config, error) {
			if config, ok := clusters[m.Name]; ok {
				return config, nil
			}
			return nil, errors.New("no way to " + m.Name)
		},
	}
	values := ""
	requestTo := func(name string, mode fleet.Mode) summaries.Request {
		r := requestFor(name, address)
		r.Member.Mode = mode
		r.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = values
		return r
	}
	got := func(name string, mode fleet.Mode) string {
		item := compose(t, composer, requestTo(name, mode))
		if item.Sensitive != (mode == fleet.Push) {
			t.Errorf("%s in %s mode: sensitive is %t", name, mode, item.Sensitive)
		}
		return strings.Join([]string{name, field(t, item, "there"), field(t, item, "missing")}, " ")
	}
	all := []string{got("one", fleet.Push), got("two", fleet.Push), got("one", fleet.Pull)}
	first = "Y2hhbmdlZA=="
	all = append(all, got("one", fleet.Push))
	values = "other: value\n"
	all = append(all, got("one", fleet.Push))
	if diff := cmp.Diff([]string{"one Zmlyc3Q= 0", "two c2Vjb25k 0", "one  0", "one Zmlyc3Q= 0", "one Y2hhbmdlZA== 0"}, all); diff != "" {
		t.Errorf("found objects differ (-want +got):\n%s", diff)
	}
	_, err := composer.Compose(t.Context(), requestTo("three", fleet.Push), libv1beta1.FeatureHelm)
	var invalid phase.Invalid
	if err == nil || errors.As(err, &invalid) || !strings.Contains(err.Error(), "no way to three") {
		t.Errorf("got %v, want an error to try again after", err)
	}
	for mode, want := range map[fleet.Mode][]match.Release{fleet.Push: nil, fleet.Pull: {{Namespace: "site", Name: "web"}}} {
		made, err := composer.Compose(t.Context(), requestTo("one", mode), libv1beta1.FeatureHelm)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, made.Unanswered); diff != "" {
			t.Errorf("unanswered in %s mode (-want +got):\n%s", mode, diff)
		}
	}
}

// TestLookupThatIsTooLargeToKeep looks up more than a Secret holds. It must deploy nevertheless.
func TestLookupThatIsTooLargeToKeep(t *testing.T) {
	t.Parallel()
	random := make([]byte, 1100000)
	_, _ = rand.Read(random)
	large := base64.StdEncoding.EncodeToString(random)
	address := charts(t, with(`there: "{{ (lookup "v1" "Secret" "site" "there").data.password | trunc 8 }}", password: "{{ randAlphaNum 20 }}"`))
	config := cluster(t, &large)
	composer := newComposer(t, newHub(interceptor.Funcs{}))
	composer.Dial = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
		fleet.Push: func(context.Context, fleet.Member) (*rest.Config, error) { return config, nil },
	}
	r := requestFor("one", address)
	r.Member.Mode = fleet.Push
	first := compose(t, composer, r)
	want := large[:8]
	if got := field(t, first, "there"); got != want {
		t.Errorf("found %q, want %q", got, want)
	}
	if got := field(t, compose(t, composer, r), "password"); got != field(t, first, "password") {
		t.Error("the generated value is not kept")
	}
}

// TestLookupOfALostRelease composes a release for two summaries with different values, in turn.
func TestLookupOfALostRelease(t *testing.T) {
	t.Parallel()
	address := charts(t, with(`there: "{{ (lookup "v1" "Secret" "site" "there").data.password }} {{ .Values.message }}", password: "{{ randAlphaNum 20 }}"`))
	there := "Zmlyc3Q="
	config := cluster(t, &there)
	hub := newHub(interceptor.Funcs{})
	owner, loser := requestFor("one", address), requestFor("one", address)
	owner.Member.Mode, loser.Member.Mode = fleet.Push, fleet.Push
	loser.Summary.Name, loser.Summary.UID = "loser", "loser"
	loser.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = "message: other\n"
	loser.Lost = []match.Contest{{Release: match.Release{Namespace: "site", Name: "web"}, Holder: owner.Summary.Name}}
	composeNow := func(r summaries.Request) bundle.Item {
		composer := newComposer(t, hub)
		composer.Dial = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
			fleet.Push: func(context.Context, fleet.Member) (*rest.Config, error) { return config, nil },
		}
		return compose(t, composer, r)
	}
	first := composeNow(owner)
	former := composeNow(loser)
	version := generatedSecrets(t, hub)[0].ResourceVersion
	there = "c2Vjb25k"
	for range 2 {
		if diff := cmp.Diff(first.Objects, composeNow(owner).Objects); diff != "" {
			t.Errorf("the release differs although its inputs do not (-want +got):\n%s", diff)
		}
		lost := composeNow(loser)
		if got := field(t, lost, "there"); got != "c2Vjb25k other" {
			t.Errorf("the lost release found %q", got)
		}
		if field(t, lost, "password") != field(t, former, "password") {
			t.Error("the generated value of the lost release is not kept")
		}
	}
	if got := generatedSecrets(t, hub)[0].ResourceVersion; got != version {
		t.Error("the Secret is written although no inputs change")
	}
}

// TestReleaseThatIsListedTwice has two charts of one release. They would store their lookup results in turn.
func TestReleaseThatIsListedTwice(t *testing.T) {
	t.Parallel()
	hub := newHub(interceptor.Funcs{})
	r := requestFor("one", charts(t, with(`password: "{{ randAlphaNum 20 }}"`)))
	second := r.Summary.Spec.ClusterProfileSpec.HelmCharts[0]
	second.ReleaseName, second.Values = `{{ print "web" }}`, "message: other\n"
	r.Summary.Spec.ClusterProfileSpec.HelmCharts = append(r.Summary.Spec.ClusterProfileSpec.HelmCharts, second)
	_, err := newComposer(t, hub).Compose(t.Context(), r, libv1beta1.FeatureHelm)
	var invalid phase.Invalid
	if !errors.As(err, &invalid) || !strings.Contains(err.Error(), "helm release site/web is listed twice") {
		t.Errorf("got %v, want a refusal that names the release", err)
	}
	if len(generatedSecrets(t, hub)) != 0 {
		t.Error("generated values are stored")
	}
}
