package source_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/source"
)

func TestNewestIsNoPreRelease(t *testing.T) {
	t.Parallel()
	server := newCountingServer(exampleRepository(t,
		examples.Chart{Name: "kyverno", Version: "3.5.1"},
		examples.Chart{Name: "kyverno", Version: "3.10.0"},
		examples.Chart{Name: "kyverno", Version: "4.0.0-rc.1"},
		examples.Chart{Name: "tetragon", Version: "v1.5.0"},
		examples.Chart{Name: "young", Version: "0.1.0-alpha"},
	))
	address := serve(t, server)
	charts := newCharts(t, t.TempDir())
	got, err := charts.Newest(t.Context(), source.Repository{URL: address + "/"}, []string{"kyverno", "missing", "tetragon", "young"})
	if !errors.Is(err, source.ErrNotFound) || !strings.Contains(err.Error(), "chart missing in "+address) {
		t.Errorf("got error %v, want an error that names the missing chart", err)
	}
	want := map[string]string{"kyverno": "3.10.0", "tetragon": "v1.5.0", "young": ""}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("newest (-want +got):\n%s", diff)
	}
	if requests := server.countRequests("/index.yaml"); requests != 1 {
		t.Errorf("the index was requested %d times, want once", requests)
	}
	// If a repository is down, the hub sends one request, not one for each chart.
	server.setHandler(http.NotFoundHandler())
	fresh := newCharts(t, t.TempDir())
	if got, err := fresh.Newest(t.Context(), source.Repository{URL: address}, []string{"kyverno", "tetragon"}); err == nil || len(got) > 0 {
		t.Errorf("got %v and no error from a repository that is down", got)
	}
	if requests := server.countRequests("/index.yaml"); requests != 2 {
		t.Errorf("the index was requested %d times, want twice", requests)
	}
	if _, err := fresh.Newest(t.Context(), source.Repository{URL: "ftp://example.com"}, nil); err == nil {
		t.Error("an invalid repository URL was accepted")
	}
}

func TestNewestInARegistryNeedsTheLogin(t *testing.T) {
	t.Parallel()
	address, _ := chartRegistry(t, "0.1.0", "0.3.0+build", "0.2.0", "1.0.0-rc.1")
	charts := newCharts(t, t.TempDir())
	login := source.Login{Username: "me", Password: "s:cret", PlainHTTP: true}
	got, err := charts.Newest(t.Context(), source.Repository{URL: address, Login: login}, []string{"hello"})
	if err != nil {
		t.Fatal(err)
	}
	if got["hello"] != "0.3.0+build" {
		t.Errorf("got %q, want 0.3.0+build", got["hello"])
	}
	for name, r := range map[string]source.Repository{
		"other":    {URL: address, Login: source.Login{PlainHTTP: true}},
		"mistaken": {URL: address, Login: source.Login{PlainHTTP: true, Username: "me", Password: "wrong"}},
	} {
		got, err := charts.Newest(t.Context(), r, []string{"hello"})
		if err == nil || len(got) > 0 || strings.Contains(err.Error(), "wrong") {
			t.Errorf("%s: got %v and %v, want an error without the password", name, got, err)
		}
		if strings.Contains(r.Key(), "wrong") || r.Key() == (source.Repository{URL: address, Login: login}).Key() {
			t.Errorf("%s: the key is %q", name, r.Key())
		}
	}
	if _, err := charts.Newest(t.Context(), source.Repository{URL: address, Login: login}, []string{"missing"}); !errors.Is(err, source.ErrNotFound) {
		t.Errorf("got error %v, want ErrNotFound", err)
	}
}

// TestNewestWithDeniedCharts uses a registry that denies one chart, like GHCR for a private chart, and then all charts.
func TestNewestWithDeniedCharts(t *testing.T) {
	t.Parallel()
	address, server := chartRegistry(t, "0.1.0")
	registry, tooMany := server.handler, false
	server.setHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case tooMany:
			w.WriteHeader(http.StatusTooManyRequests)
		case strings.Contains(r.URL.Path, "/denied/"):
			w.WriteHeader(http.StatusForbidden)
		default:
			registry.ServeHTTP(w, r)
		}
	}))
	repository := source.Repository{URL: address, Login: source.Login{Username: "me", Password: "s:cret", PlainHTTP: true}}
	got, err := newCharts(t, t.TempDir()).Newest(t.Context(), repository, []string{"denied", "hello"})
	wantTexts(t, err, "chart denied in "+address, "403")
	if diff := cmp.Diff(map[string]string{"hello": "0.1.0"}, got); diff != "" {
		t.Errorf("newest (-want +got):\n%s", diff)
	}
	tooMany = true
	before := server.countRequests("/v2/charts/hello/tags/list")
	if got, err := newCharts(t, t.TempDir()).Newest(t.Context(), repository, []string{"denied", "hello"}); err == nil || len(got) > 0 {
		t.Errorf("got %v, %v", got, err)
	}
	if after := server.countRequests("/v2/charts/hello/tags/list"); after != before {
		t.Error("the next chart was requested from a registry that responds with too many requests")
	}
}

func TestOutdated(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		version, newest string
		want            bool
	}{
		"older":          {"1.2.3", "1.10.0", true},
		"same":           {"1.2.3", "v1.2.3", false},
		"newer":          {"2.0.0-rc.1", "1.9.0", false},
		"pre-release of": {"2.0.0-rc.1", "2.0.0", true},
		"build only":     {"1.2.3+a", "1.2.3+b", false},
		"no version":     {"latest", "1.0.0", false},
		"nothing newer":  {"1.0.0", "", false},
	} {
		if got := source.IsOutdated(test.version, test.newest); got != test.want {
			t.Errorf("%s: got %t, want %t", name, got, test.want)
		}
	}
}
