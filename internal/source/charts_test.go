package source_test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/source"
)

// countingServer serves a handler, and counts the requests by path and the responses by status.
type countingServer struct {
	mu      sync.Mutex // guards the fields below
	handler http.Handler
	paths   map[string]int
	status  map[int]int
}

func (c *countingServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	handler := c.handler
	c.paths[r.URL.Path]++
	c.mu.Unlock()
	recorded := &statusRecorder{ResponseWriter: w, status: http.StatusOK}
	handler.ServeHTTP(recorded, r)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status[recorded.status]++
}

func (c *countingServer) setHandler(handler http.Handler) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handler = handler
}

func (c *countingServer) countRequests(path string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.paths[path]
}

type statusRecorder struct {
	http.ResponseWriter
	status int
}

func (s *statusRecorder) WriteHeader(status int) {
	s.status = status
	s.ResponseWriter.WriteHeader(status)
}

func newCountingServer(handler http.Handler) *countingServer {
	return &countingServer{handler: handler, paths: map[string]int{}, status: map[int]int{}}
}

func exampleRepository(t *testing.T, charts ...examples.Chart) http.Handler {
	t.Helper()
	handler, err := examples.Repository(charts...)
	if err != nil {
		t.Fatal(err)
	}
	return handler
}

func serve(t *testing.T, handler http.Handler) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

func newCharts(t *testing.T, dir string) *source.Charts {
	t.Helper()
	charts, err := source.NewCharts(dir, clocktesting.NewFakePassiveClock(time.Unix(0, 0)))
	if err != nil {
		t.Fatal(err)
	}
	return charts
}

// awaitResponse calls fetch until the repository has responded, and returns the error. On a busy machine, a single call
// may not wait long enough.
func awaitResponse(fetch func() error) error {
	for {
		err := fetch()
		pending, ok := errors.AsType[*source.PendingError](err)
		if !ok {
			return err
		}
		<-time.After(pending.After)
	}
}

func helmChart(address, name, version string) configv1beta1.HelmChart {
	return configv1beta1.HelmChart{RepositoryURL: address, RepositoryName: "repo", ChartName: name, ChartVersion: version}
}

func TestFetchChoosesVersions(t *testing.T) {
	t.Parallel()
	address := serve(t, exampleRepository(t,
		examples.Chart{Name: "kyverno", Version: "3.5.1", AppVersion: "v1.15.1"},
		examples.Chart{Name: "kyverno", Version: "3.3.3"},
		examples.Chart{Name: "kyverno", Version: "3.6.0-rc.1"},
		examples.Chart{Name: "tetragon", Version: "v1.5.0"},
	))
	charts := newCharts(t, t.TempDir())
	for name, test := range map[string]struct{ chart, version, want string }{
		"as written":         {"repo/kyverno", "3.5.1", "3.5.1"},
		"leading v too much": {"repo/kyverno", "v3.3.3", "3.3.3"},
		"leading v missing":  {"repo/tetragon", "1.5.0", "v1.5.0"},
		"without repository": {"kyverno", "3.5.1", "3.5.1"},
		"range":              {"repo/kyverno", "3.x", "3.5.1"},
		"narrow range":       {"repo/kyverno", "~3.3.0", "3.3.3"},
		"pre-release":        {"repo/kyverno", ">=3.6.0-0", "3.6.0-rc.1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := awaitResult(func() (source.Chart, error) {
				return charts.Fetch(t.Context(), helmChart(address, test.chart, test.version), source.Login{}, source.Verification{}, nil)
			})
			if err != nil {
				t.Fatal(err)
			}
			if got.Version != test.want {
				t.Errorf("got version %s, want %s", got.Version, test.want)
			}
			archive, err := os.ReadFile(got.Path)
			if err != nil {
				t.Fatal(err)
			}
			if sum := sha256.Sum256(archive); hex.EncodeToString(sum[:]) != got.Digest {
				t.Errorf("the archive does not have the digest %s", got.Digest)
			}
		})
	}
}

func TestFetchDownloadsOnce(t *testing.T) {
	t.Parallel()
	server := newCountingServer(exampleRepository(t))
	address, dir := serve(t, server), t.TempDir()
	charts := newCharts(t, dir)
	var group sync.WaitGroup
	for range 50 {
		group.Go(func() {
			_, err := awaitResult(func() (source.Chart, error) {
				return charts.Fetch(t.Context(), helmChart(address, "repo/hello", "0.1.0"), source.Login{}, source.Verification{}, nil)
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	server.setHandler(http.NotFoundHandler())
	for _, again := range []*source.Charts{charts, newCharts(t, dir)} {
		if _, err := again.Fetch(t.Context(), helmChart(address, "repo/hello", "v0.1.0"), source.Login{}, source.Verification{}, nil); err != nil {
			t.Errorf("fetch a cached chart without its repository: %v", err)
		}
	}
	for path, want := range map[string]int{"/index.yaml": 1, "/hello-0.1.0.tgz": 1} {
		if got := server.countRequests(path); got != want {
			t.Errorf("%s was requested %d times, want %d", path, got, want)
		}
	}
}

func TestFetchReplacesADamagedArchive(t *testing.T) {
	t.Parallel()
	address, dir := serve(t, exampleRepository(t)), t.TempDir()
	first, err := newCharts(t, dir).Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), source.Login{}, source.Verification{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(first.Path, []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	second, err := newCharts(t, dir).Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), source.Login{}, source.Verification{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(second.Path)
	if err != nil || string(archive) == "damaged" {
		t.Errorf("the damaged archive was not replaced (%v)", err)
	}
}

func TestIndexIsCachedUntilAVersionIsMissing(t *testing.T) {
	t.Parallel()
	server := newCountingServer(exampleRepository(t, examples.Chart{Version: "0.1.0"}))
	address := serve(t, server)
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	charts, err := source.NewCharts(t.TempDir(), clock)
	if err != nil {
		t.Fatal(err)
	}
	fetch := func(version, want string) {
		t.Helper()
		got, err := charts.Fetch(t.Context(), helmChart(address, "hello", version), source.Login{}, source.Verification{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got.Version != want {
			t.Errorf("version %s is %s, want %s", version, got.Version, want)
		}
	}
	wantIndexes := func(want, unchanged int) {
		t.Helper()
		if got := server.countRequests("/index.yaml"); got != want || server.status[http.StatusNotModified] != unchanged {
			t.Errorf("the index was requested %d times and unchanged %d times, want %d and %d", got, server.status[http.StatusNotModified], want, unchanged)
		}
	}
	fetch("0.x", "0.1.0")
	fetch("0.x", "0.1.0")
	wantIndexes(1, 0)
	clock.SetTime(time.Unix(61, 0))
	fetch("0.x", "0.1.0")
	wantIndexes(2, 1)
	server.setHandler(exampleRepository(t, examples.Chart{Version: "0.1.0"}, examples.Chart{Version: "0.2.0"}))
	fetch("0.x", "0.1.0")
	fetch("0.2.0", "0.2.0") // not in the cached index, so the index is requested at once
	fetch("0.x", "0.2.0")
	wantIndexes(3, 1)
}

// TestMissingVersionIsRemembered fetches a version that does not exist several times, like the clusters of a rollout,
// and then after it was published.
func TestMissingVersionIsRemembered(t *testing.T) {
	t.Parallel()
	server := newCountingServer(exampleRepository(t, examples.Chart{Version: "0.1.0"}))
	address := serve(t, server)
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	charts, err := source.NewCharts(t.TempDir(), clock)
	if err != nil {
		t.Fatal(err)
	}
	fetch := func() error {
		_, err := charts.Fetch(t.Context(), helmChart(address, "hello", "9.9.9"), source.Login{}, source.Verification{}, nil)
		return err
	}
	for range 10 {
		if err := fetch(); !errors.Is(err, source.ErrNotFound) {
			t.Fatalf("got %v, want ErrNotFound", err)
		}
	}
	if got := server.countRequests("/index.yaml"); got > 2 {
		t.Errorf("the index was requested %d times", got)
	}
	server.setHandler(exampleRepository(t, examples.Chart{Version: "9.9.9"}))
	clock.SetTime(time.Unix(10, 0))
	if err := fetch(); err != nil {
		t.Errorf("got %v after the version was published", err)
	}
}

func TestFetchErrorsNameChartAndRepository(t *testing.T) {
	t.Parallel()
	archive, err := examples.Chart{}.Archive()
	if err != nil {
		t.Fatal(err)
	}
	entry := "entries:\n  hello:\n  - {version: 0.1.0, digest: abcd, urls: [hello.tgz]}\n"
	const unreachable, textOfServer = "http://127.0.0.1:1", "text-of-the-server"
	example, charts := serve(t, exampleRepository(t)), newCharts(t, t.TempDir())
	for name, test := range map[string]struct {
		address, version string
		want             []string
		missing          bool
		invalid          bool
	}{
		"no such version": {address: example, version: "9.9.9", want: []string{"chart repo/hello 9.9.9 in " + example + ": does not exist"}, missing: true},
		"no such range":   {address: example, version: ">9", want: []string{"chart repo/hello >9 in " + example + ": does not exist"}, missing: true},
		"not a version":   {address: example, version: "latest", want: []string{`parse chartVersion "latest"`}, invalid: true},
		"unreachable":     {address: unreachable, version: "0.1.0", want: []string{"chart repo/hello 0.1.0 in " + unreachable, "connection refused"}},
		"not there":       {address: serve(t, http.NotFoundHandler()), version: "0.1.0", want: []string{"/index.yaml", "404 Not Found"}},
		"not an index":    {address: serve(t, text("<html>hello</html>")), version: "0.1.0", want: []string{"index.yaml"}},
		"an empty index":  {address: serve(t, text("apiVersion: v1\n")), version: "0.1.0", want: []string{"is not an index of charts"}},
		"wrong digest":    {address: serve(t, at(map[string]string{"/index.yaml": entry, "/hello.tgz": string(archive)})), version: "0.1.0", want: []string{"/hello.tgz", "digest"}},
		"not an archive":  {address: serve(t, at(map[string]string{"/index.yaml": "entries:\n  hello:\n  - {version: 0.1.0, urls: [hello.tgz]}\n", "/hello.tgz": "x"})), version: "0.1.0", want: []string{"read the archive"}},
		"no URL":          {address: serve(t, text("entries:\n  hello:\n  - {version: 0.1.0}\n")), version: "0.1.0", want: []string{"has no URL for it"}},
		"long URL":        {address: serve(t, text("entries:\n  hello:\n  - {version: 0.1.0, urls: ["+strings.Repeat("x", 9<<10)+"]}\n")), version: "0.1.0", want: []string{"its URL in the repository's index has more than 8 KiB"}},
		"no valid URL":    {address: serve(t, text("entries:\n  hello:\n  - {version: 0.1.0, urls: ['http://%zz"+textOfServer+"']}\n")), version: "0.1.0", want: []string{"its URL in the repository's index is not valid"}},
		"other scheme":    {address: "ftp://example.com", version: "0.1.0", want: []string{`repositoryURL "ftp://example.com" does not begin with http://, https:// or oci://`}, invalid: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := awaitResult(func() (source.Chart, error) {
				return charts.Fetch(t.Context(), helmChart(test.address, "repo/hello", test.version), source.Login{}, source.Verification{}, nil)
			})
			if test.invalid {
				wantInvalid(t, err)
			}
			if errors.Is(err, source.ErrNotFound) != test.missing {
				t.Errorf("got %v, want ErrNotFound: %v", err, test.missing)
			}
			wantTexts(t, err, test.want...)
			if err != nil && strings.Contains(err.Error(), textOfServer) {
				t.Errorf("the error has a text of the server: %v", err)
			}
		})
	}
}

func text(body string) http.Handler { return at(map[string]string{"/index.yaml": body}) }

func at(bodies map[string]string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, ok := bodies[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if _, err := w.Write([]byte(body)); err != nil {
			panic(http.ErrAbortHandler)
		}
	})
}

func TestLoginsAreKeptApart(t *testing.T) {
	t.Parallel()
	server := newCountingServer(withPassword(exampleRepository(t)))
	address, charts := serve(t, server), newCharts(t, t.TempDir())
	if _, err := charts.Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), source.Login{Username: "me", Password: "s:cret"}, source.Verification{}, nil); err != nil {
		t.Fatal(err)
	}
	for name, login := range map[string]source.Login{"none": {}, "wrong": {Username: "me", Password: "guess"}} {
		_, err := charts.Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), login, source.Verification{}, nil)
		t.Run(name, func(t *testing.T) { wantTexts(t, err, address, "401 Unauthorized") })
	}
}

func withPassword(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "me" || password != "s:cret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="charts"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func TestLoginGoesToTheRepositoryOnly(t *testing.T) {
	t.Parallel()
	archive, err := examples.Chart{}.Archive()
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		if _, err := w.Write(archive); err != nil {
			panic(http.ErrAbortHandler)
		}
	}))
	address := serve(t, withPassword(text("entries:\n  hello:\n  - {version: 0.1.0, urls: ['"+elsewhere+"/hello.tgz']}\n")))
	login := source.Login{Username: "me", Password: "s:cret"}
	if _, err := newCharts(t, t.TempDir()).Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), login, source.Verification{}, nil); err != nil {
		t.Error(err)
	}
	login.PassCredentialsAll = true
	_, err = newCharts(t, t.TempDir()).Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), login, source.Verification{}, nil)
	wantTexts(t, err, "418")
}

func TestCertificatesAreChecked(t *testing.T) {
	t.Parallel()
	server := httptest.NewTLSServer(exampleRepository(t))
	t.Cleanup(server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	for name, test := range map[string]struct {
		login source.Login
		want  string
	}{
		"unknown authority": {want: "certificate"},
		"own authority":     {login: source.Login{CA: ca}},
		"not checked":       {login: source.Login{InsecureSkipTLSVerify: true}},
		"broken authority":  {login: source.Login{CA: []byte("x")}, want: "CA is not PEM"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := newCharts(t, t.TempDir()).Fetch(t.Context(), helmChart(server.URL, "hello", "0.1.0"), test.login, source.Verification{}, nil)
			if test.want == "" && err != nil {
				t.Error(err)
			}
			if test.want != "" {
				wantTexts(t, err, test.want)
			}
		})
	}
}
