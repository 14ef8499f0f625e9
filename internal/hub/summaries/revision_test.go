package summaries_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

func TestReleaseSeesItsRevision(t *testing.T) {
	t.Parallel()
	address := charts(t, with(`seen: "{{ .Release.Revision }} {{ .Release.IsInstall }} {{ .Release.IsUpgrade }} {{ .Values.message }}"`))
	hub := newHub(interceptor.Funcs{})
	r := requestFor("one", address)
	// deploy composes with these values, as a hub that was restarted, and records the releases that the transport reports
	// as deployed.
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

// TestReleaseWithRecords deploys a release with records on a member that the hub can read. helm has deployed the
// release, or the summary itself with other values.
func TestReleaseWithRecords(t *testing.T) {
	t.Parallel()
	address := charts(t, with(`seen: "{{ .Release.Revision }} {{ .Release.IsInstall }} {{ .Release.IsUpgrade }}"`))
	for records, want := range map[string]struct{ first, later string }{
		"":                        {first: "1 true false", later: "6 false true"}, // later: the records were deleted
		"1 failed":                {first: "2 true false", later: "2 true false"},
		"3 uninstalled":           {first: "4 true false", later: "4 true false"},
		"1 superseded 2 deployed": {first: "3 false true", later: "3 false true"},
		"2 deployed 3 failed":     {first: "4 false true", later: "4 false true"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			list := &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}}
			if r.URL.Path == "/api/v1/namespaces/site/secrets" && r.URL.Query().Get("labelSelector") == "name=web,owner=helm" {
				for record := range slices.Chunk(strings.Fields(records), 2) {
					list.Items = append(list.Items, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
						Namespace: "site", Name: "sh.helm.release.v1.web.v" + record[0],
						Labels: map[string]string{"owner": "helm", "name": "web", "version": record[0], "status": record[1]},
					}})
				}
			}
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(list)
		}))
		t.Cleanup(server.Close)
		composer := newComposer(t, newHub(interceptor.Funcs{}))
		composer.MemberConfig = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
			fleet.Push: func(context.Context, fleet.Member) (*rest.Config, error) { return &rest.Config{Host: server.URL}, nil },
		}
		r := requestFor("one", address)
		r.Member.Mode = fleet.Push
		if got := field(t, compose(t, composer, r), "seen"); got != want.first {
			t.Errorf("with records %q: templates see %q, want %q", records, got, want.first)
		}
		r.Member.Mode = fleet.Pull
		if got, want := field(t, compose(t, composer, r), "seen"), "1 true false"; got != want {
			t.Errorf("with records %q in pull mode: templates see %q, want %q", records, got, want)
		}
		r.Member.Mode, r.Deployed = fleet.Push, []bundle.DeployedRelease{{Namespace: "site", Name: "web", Inputs: "former", Revision: 5, IsUpgrade: true}}
		if got := field(t, compose(t, composer, r), "seen"); got != want.later {
			t.Errorf("with records %q and other values deployed: templates see %q, want %q", records, got, want.later)
		}
	}
}

func TestReleaseOfAnotherProfileInPullMode(t *testing.T) {
	t.Parallel()
	address := charts(t, with(`seen: "{{ .Release.Revision }} {{ .Release.IsInstall }} {{ .Release.IsUpgrade }}"`))
	composer := newComposer(t, newHub(interceptor.Funcs{}))
	composer.ListDeployed = func(context.Context, fleet.Member) ([]bundle.Deployed, error) {
		return []bundle.Deployed{
			{Releases: []bundle.DeployedRelease{{Namespace: "site", Name: "other", Revision: 7}}},
			{Releases: []bundle.DeployedRelease{{Namespace: "site", Name: "web", Inputs: "former", Revision: 3}}},
		}, nil
	}
	if got, want := field(t, compose(t, composer, requestFor("one", address)), "seen"), "4 false true"; got != want {
		t.Errorf("templates see %q, want %q", got, want)
	}
}

// TestOutdatedReleaseIsRenderedAgain composes a release that a member in pull mode reports as outdated, and then again
// with the second rendering delivered.
func TestOutdatedReleaseIsRenderedAgain(t *testing.T) {
	t.Parallel()
	address := charts(t, with(`seen: "{{ .Release.Revision }} {{ .Release.IsInstall }} {{ .Release.IsUpgrade }} {{ .Values.message }}"`))
	for name, tc := range map[string]struct {
		outdated bundle.OutdatedRelease
		values   string
		want     string
	}{
		"a deployed release": {
			outdated: bundle.OutdatedRelease{Namespace: "site", Name: "web", Revision: 3, IsUpgrade: true}, values: "message: a", want: "3 false true a",
		},
		"a failed release": {
			outdated: bundle.OutdatedRelease{Namespace: "site", Name: "web", Revision: 4}, values: "message: a", want: "4 true false a",
		},
		"the values change at the same time": {
			outdated: bundle.OutdatedRelease{Namespace: "site", Name: "web", Revision: 3, IsUpgrade: true}, values: "message: b", want: "3 false true b",
		},
		"another release": {
			outdated: bundle.OutdatedRelease{Namespace: "site", Name: "other", Revision: 3, IsUpgrade: true}, values: "message: a", want: "1 true false a",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := requestFor("one", address)
			r.Member.Mode = fleet.Pull
			isReported := false
			deploy := func(values string) string {
				r.Summary.Spec.ClusterProfileSpec.HelmCharts[0].Values = values
				made, err := newComposer(t, newHub(interceptor.Funcs{})).Compose(t.Context(), r, libv1beta1.FeatureHelm)
				if err != nil {
					t.Fatal(err)
				}
				// Other values are compared again, since the records may have changed meanwhile.
				isReported = isReported || values == "message: a" && slices.ContainsFunc(r.Outdated, func(o bundle.OutdatedRelease) bool { return o.Name == "web" })
				if got := made.Bundle.Items[0].Release.IsUnconfirmed; got == isReported {
					t.Errorf("the release is unconfirmed: got %t with the outdated releases %v", got, r.Outdated)
				}
				r.Deployed, r.Outdated = made.Bundle.DeployedReleases(), nil
				return field(t, made.Bundle.Items[0], "seen")
			}
			if got, want := deploy("message: a"), "1 true false a"; got != want {
				t.Fatalf("the first rendering: got %q, want %q", got, want)
			}
			r.Outdated = []bundle.OutdatedRelease{tc.outdated}
			if got := deploy(tc.values); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
			if got := deploy(tc.values); got != tc.want {
				t.Errorf("after it was delivered: got %q, want %q", got, tc.want)
			}
		})
	}
}

// TestEachReleaseIsComparedOnce adds a release to a profile while the member reports another one as outdated. The
// member compares each release until the hub has rendered it as reported.
func TestEachReleaseIsComparedOnce(t *testing.T) {
	t.Parallel()
	for _, mode := range []fleet.Mode{fleet.Pull, fleet.Push} {
		r := requestFor("one", charts(t, with(`seen: "{{ .Release.Revision }}"`)))
		r.Member.Mode = mode
		charts := &r.Summary.Spec.ClusterProfileSpec.HelmCharts
		var got []string
		deploy := func(outdated ...bundle.OutdatedRelease) {
			t.Helper()
			r.Outdated = outdated
			composer := newComposer(t, newHub(interceptor.Funcs{}))
			composer.MemberConfig = dialTo(t, fleet.Push)
			made, err := composer.Compose(t.Context(), r, libv1beta1.FeatureHelm)
			if err != nil {
				t.Fatal(err)
			}
			var unconfirmed []string
			for _, item := range made.Bundle.Items {
				if item.Release.IsUnconfirmed {
					unconfirmed = append(unconfirmed, item.Release.Name)
				}
			}
			got = append(got, strings.Join(unconfirmed, " "))
			r.Deployed = made.Bundle.DeployedReleases()
		}
		deploy()
		added := (*charts)[0]
		added.ReleaseName = "added"
		*charts = append(*charts, added)
		deploy(bundle.OutdatedRelease{Namespace: "site", Name: "web", Revision: 3, IsUpgrade: true})
		deploy(bundle.OutdatedRelease{Namespace: "site", Name: "web"}, bundle.OutdatedRelease{Namespace: "site", Name: "added", Revision: 2, IsUpgrade: true})
		(*charts)[0].Values = "message: changed"
		deploy()
		if diff := cmp.Diff([]string{"web", "added", "", "web"}, got); diff != "" {
			t.Errorf("%s: the unconfirmed releases differ (-want +got):\n%s", mode, diff)
		}
	}
}

// dialTo connects to a member without release records.
func dialTo(t *testing.T, mode fleet.Mode) map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(&metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}})
	}))
	t.Cleanup(server.Close)
	return map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
		mode: func(context.Context, fleet.Member) (*rest.Config, error) { return &rest.Config{Host: server.URL}, nil },
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

// TestReleaseOfALostInventory has release records on the member, and no inventory. The rendering of a record has the
// placeholder INPUTS for the inputs of the request.
func TestReleaseOfALostInventory(t *testing.T) {
	t.Parallel()
	address := charts(t, with(`seen: "{{ .Release.Revision }} {{ .Release.IsInstall }} {{ .Release.IsUpgrade }}"`))
	const own = "ClusterSummary/profile-one/Helm"
	for name, tc := range map[string]struct {
		status, requestor, rendering string
		hub                          string
		want                         string
	}{
		"an installation":           {status: "deployed", requestor: own, rendering: "INPUTS 1 false", want: "1 true false"},
		"an upgrade":                {status: "deployed", requestor: own, rendering: "INPUTS 5 true", want: "5 false true"},
		"a failed attempt":          {status: "failed", requestor: own, rendering: "INPUTS 1 false", want: "1 true false"},
		"other inputs":              {status: "deployed", requestor: own, rendering: "other 1 false", want: "3 false true"},
		"of another profile":        {status: "deployed", requestor: "ClusterSummary/other/Helm", rendering: "INPUTS 1 false", want: "3 false true"},
		"of another hub":            {status: "deployed", requestor: own, rendering: "INPUTS 1 false", hub: "other", want: "3 false true"},
		"no rendering in it":        {status: "deployed", requestor: own, want: "3 false true"},
		"an unreadable rendering":   {status: "deployed", requestor: own, rendering: "INPUTS -1 x", want: "3 false true"},
		"helm wrote the last one":   {status: "deployed", want: "3 false true"},
		"helm uninstalled the last": {status: "uninstalled", want: "3 true false"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := requestFor("one", address)
			r.Member.Mode = fleet.Push
			composer := newComposer(t, newHub(interceptor.Funcs{}))
			inputs := ""
			record := func() metav1.PartialObjectMetadata {
				annotations := map[string]string{}
				for key, value := range map[string]string{
					"towline.dev/requestor": tc.requestor, "towline.dev/hub": tc.hub,
					"towline.dev/rendering": strings.ReplaceAll(tc.rendering, "INPUTS", inputs),
				} {
					if value != "" {
						annotations[key] = value
					}
				}
				return metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
					Namespace: "site", Name: "sh.helm.release.v1.web.v2", Annotations: annotations,
					Labels: map[string]string{"owner": "helm", "name": "web", "version": "2", "status": tc.status},
				}}
			}
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				list := &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}}
				list.Items = append(list.Items, record())
				w.Header().Set("Content-Type", "application/json")
				_ = json.NewEncoder(w).Encode(list)
			}))
			t.Cleanup(server.Close)
			composer.MemberConfig = map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error){
				fleet.Push: func(context.Context, fleet.Member) (*rest.Config, error) { return &rest.Config{Host: server.URL}, nil },
			}
			inputs = compose(t, composer, r).Release.Inputs
			if got := field(t, compose(t, composer, r), "seen"); got != tc.want {
				t.Errorf("templates see %q, want %q", got, tc.want)
			}
		})
	}
}
