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
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
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
	composer.MemberConfig = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
		fleet.Push: func(_ context.Context, m fleet.Member) (*rest.Config, error) {
			if config, ok := clusters[m.Name]; ok {
				return config, nil
			}
			return nil, errors.New("no way to " + m.Name)
		},
	}
	values := ""
	requestTo := func(name string, mode fleet.Mode) summaries.ComposeRequest {
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
	all := []string{got("one", fleet.Push), got("two", fleet.Push), got("pulled", fleet.Pull)}
	first = "Y2hhbmdlZA=="
	all = append(all, got("one", fleet.Push))
	values = "other: value\n"
	all = append(all, got("one", fleet.Push))
	if diff := cmp.Diff([]string{"one Zmlyc3Q= 0", "two c2Vjb25k 0", "pulled  0", "one Zmlyc3Q= 0", "one Y2hhbmdlZA== 0"}, all); diff != "" {
		t.Errorf("found objects differ (-want +got):\n%s", diff)
	}
	_, err := composer.Compose(t.Context(), requestTo("three", fleet.Push), libv1beta1.FeatureHelm)
	var invalid phase.TerminalError
	if err == nil || errors.As(err, &invalid) || !strings.Contains(err.Error(), "no way to three") {
		t.Errorf("got %v, want an error to try again after", err)
	}
	for mode, want := range map[fleet.Mode][]match.Release{fleet.Push: nil, fleet.Pull: {{Namespace: "site", Name: "web"}}} {
		member := map[fleet.Mode]string{fleet.Push: "one", fleet.Pull: "pulled"}[mode]
		made, err := composer.Compose(t.Context(), requestTo(member, mode), libv1beta1.FeatureHelm)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, made.UnansweredLookups); diff != "" {
			t.Errorf("unanswered in %s mode (-want +got):\n%s", mode, diff)
		}
	}
}

// TestLookupThatIsTooLargeToStore looks up more data than fits in a Secret. The chart must be deployed nevertheless.
func TestLookupThatIsTooLargeToStore(t *testing.T) {
	t.Parallel()
	random := make([]byte, 1100000)
	_, _ = rand.Read(random)
	large := base64.StdEncoding.EncodeToString(random)
	address := charts(t, with(`there: "{{ (lookup "v1" "Secret" "site" "there").data.password | trunc 8 }}", password: "{{ randAlphaNum 20 }}"`))
	config := cluster(t, &large)
	composer := newComposer(t, newHub(interceptor.Funcs{}))
	composer.MemberConfig = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
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
	loser.Conflicts = []match.Conflict{{Release: match.Release{Namespace: "site", Name: "web"}, Manager: owner.Summary.Name}}
	composeNow := func(r summaries.ComposeRequest) bundle.Item {
		composer := newComposer(t, hub)
		composer.MemberConfig = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
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

// managing is a chart whose upgrade fails if lookup does not find the Secret of its installation.
func managing() examples.Chart {
	chart := with(`found: "{{ $found.data.message }} {{ $found.data.password }}"`)
	const added = "templates/added.yaml"
	chart.Files[added] = `{{ $found := lookup "v1" "Secret" "site" "own" | default (dict "data" (dict "message" "-" "password" "-")) }}` +
		"{{ if and .Release.IsUpgrade (eq $found.data.message \"-\") }}{{ fail \"PASSWORDS ERROR\" }}{{ end }}\n" + chart.Files[added] +
		"---\napiVersion: v1\nkind: Secret\nmetadata: {name: own}\nstringData: {message: {{ .Values.message }}, password: {{ randAlphaNum 20 }}}\n"
	return chart
}

// foundText returns field "found" of a release of managing that finds these texts.
func foundText(message, password string) string {
	return base64.StdEncoding.EncodeToString([]byte(message)) + " " + base64.StdEncoding.EncodeToString([]byte(password))
}

// ownPassword returns the password in Secret own.
func ownPassword(t *testing.T, item bundle.Item) string {
	t.Helper()
	for _, object := range item.Objects {
		if object.GetName() == "own" {
			password, _, _ := unstructured.NestedString(object.Object, "stringData", "password")
			return password
		}
	}
	t.Fatal("Secret own is missing")
	return ""
}

// TestUpgradeOfAPullMemberFindsItsOwnObjects composes each revision twice, as a hub that was restarted.
func TestUpgradeOfAPullMemberFindsItsOwnObjects(t *testing.T) {
	t.Parallel()
	writes := 0
	hub := newHub(interceptor.Funcs{
		Update: func(ctx context.Context, hub client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			writes++
			return hub.Update(ctx, obj, opts...)
		},
	})
	r := requestFor("one", charts(t, managing()))
	password := ""
	for i, message := range []string{"first", "second", "third"} {
		r.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = "message: " + message + "\n"
		var digests []bundle.Digest
		for range 2 {
			made, err := newComposer(t, hub).Compose(t.Context(), r, libv1beta1.FeatureHelm)
			if err != nil {
				t.Fatalf("%s: %v", message, err)
			}
			if len(made.UnansweredLookups) > 0 {
				t.Errorf("%s: lookups of %v are reported", message, made.UnansweredLookups)
			}
			r.Deployed = made.Bundle.DeployedReleases()
			digests = append(digests, made.Digest)
			item := made.Bundle.Items[0]
			if want := []string{"- -", foundText("first", password), foundText("second", password)}[i]; field(t, item, "found") != want {
				t.Errorf("%s: found %q, want %q", message, field(t, item, "found"), want)
			}
			password = ownPassword(t, item)
		}
		if digests[0] != digests[1] {
			t.Errorf("%s: another revision without another input", message)
		}
	}
	if writes != 2 {
		t.Errorf("got %d updates of the generated values, want one for each upgrade", writes)
	}
}

// TestUpgradeFindsTheObjectsOfTheReleaseOwner composes a release for two summaries in turn, on a pull member. Then the
// other summary takes the release over.
func TestUpgradeFindsTheObjectsOfTheReleaseOwner(t *testing.T) {
	t.Parallel()
	hub, address := newHub(interceptor.Funcs{}), charts(t, managing())
	owner, loser := requestFor("one", address), requestFor("one", address)
	loser.Summary.Name, loser.Summary.UID = "loser", "loser"
	loser.Conflicts = []match.Conflict{{Release: match.Release{Namespace: "site", Name: "web"}, Manager: owner.Summary.Name}}
	deploy := func(r *summaries.ComposeRequest, message string) bundle.Item {
		t.Helper()
		r.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = "message: " + message + "\n"
		made, err := newComposer(t, hub).Compose(t.Context(), *r, libv1beta1.FeatureHelm)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Conflicts) == 0 {
			r.Deployed, r.State = made.Bundle.DeployedReleases(), bundle.StateApplied
			compose(t, newComposer(t, hub), *r) // the report triggers it
		}
		return made.Bundle.Items[0]
	}
	password := ownPassword(t, deploy(&owner, "first"))
	version := ""
	for _, step := range []struct {
		request *summaries.ComposeRequest
		message string
		found   string
	}{
		{&loser, "lost", "first"},
		{&owner, "second", "first"},
		{&loser, "lost", "second"},
		{&owner, "second", "first"},
	} {
		if got, want := field(t, deploy(step.request, step.message), "found"), foundText(step.found, password); got != want {
			t.Errorf("%s found %q, want %q", step.message, got, want)
		}
		if step.message == "second" {
			now := generatedSecrets(t, hub)[0].ResourceVersion
			if version != "" && now != version {
				t.Error("the Secret is written although no inputs change")
			}
			version = now
		}
	}
	loser.Conflicts = nil
	if got, want := field(t, deploy(&loser, "taken over"), "found"), foundText("second", password); got != want {
		t.Errorf("the new owner found %q, want %q", got, want)
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
	var invalid phase.TerminalError
	if !errors.As(err, &invalid) || !strings.Contains(err.Error(), "helm release site/web is listed twice") {
		t.Errorf("got %v, want a refusal that names the release", err)
	}
	if len(generatedSecrets(t, hub)) != 0 {
		t.Error("generated values are stored")
	}
}
