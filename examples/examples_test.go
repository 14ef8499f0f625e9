package examples_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"

	"github.com/towline/towline/examples"
)

func TestArchiveFollowsTheName(t *testing.T) {
	t.Parallel()
	loaded := load(t, examples.Chart{Name: "kyverno", Version: "3.5.1", AppVersion: "v1.15.1"})
	if got, want := loaded.Metadata.Name+" "+loaded.Metadata.Version+" "+loaded.Metadata.AppVersion, "kyverno 3.5.1 v1.15.1"; got != want {
		t.Errorf("metadata is %q, want %q", got, want)
	}
	crds := loaded.CRDObjects()
	if len(crds) != 1 || !strings.Contains(string(crds[0].File.Data), "greetings.kyverno.examples.towline.dev") {
		t.Errorf("the resource type does not follow the name: %v", crds)
	}
	if len(loaded.Dependencies()) != 1 {
		t.Errorf("got %d subcharts, want 1", len(loaded.Dependencies()))
	}
}

func TestArchiveIsReproducible(t *testing.T) {
	t.Parallel()
	first, err := examples.Chart{}.Archive()
	if err != nil {
		t.Fatal(err)
	}
	second, err := examples.Chart{}.Archive()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Error("two archives of the same chart differ")
	}
}

func TestRepositoryServesChartsAndAnswersConditionalRequests(t *testing.T) {
	t.Parallel()
	handler, err := examples.Repository(examples.Chart{}, examples.Chart{Name: "kyverno", Version: "v3.5.1"})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	for path, want := range map[string]int{"/index.yaml": 200, "/hello-0.1.0.tgz": 200, "/kyverno-v3.5.1.tgz": 200, "/other-1.0.0.tgz": 404} {
		response := get(t, server.URL+path, "")
		if response.StatusCode != want {
			t.Errorf("GET %s answers %d, want %d", path, response.StatusCode, want)
		}
		if want != http.StatusOK {
			continue
		}
		if again := get(t, server.URL+path, response.Header.Get("ETag")); again.StatusCode != http.StatusNotModified {
			t.Errorf("GET %s with its ETag answers %d, want 304", path, again.StatusCode)
		}
	}
}

func TestProfilesPointAtTheRepository(t *testing.T) {
	t.Parallel()
	profiles, err := examples.Profiles("http://127.0.0.1:12345")
	if err != nil {
		t.Fatal(err)
	}
	if got := string(profiles); !strings.Contains(got, "repositoryURL: http://127.0.0.1:12345\n") || strings.Contains(got, "8879") {
		t.Errorf("profiles do not point at the repository:\n%s", got)
	}
}

func load(t *testing.T, c examples.Chart) *chart.Chart {
	t.Helper()
	archive, err := c.Archive()
	if err != nil {
		t.Fatal(err)
	}
	loaded, err := loader.LoadArchive(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	return loaded
}

func get(t *testing.T, url, etag string) *http.Response {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if etag != "" {
		request.Header.Set("If-None-Match", etag)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		t.Fatal(err)
	}
	return response
}
