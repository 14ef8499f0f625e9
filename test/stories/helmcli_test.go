package stories

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/towline/towline/internal/localkube"
)

// helm runs the real helm command against a plane and returns its standard output. It has the Helm repositories of the
// story.
func (w *world) helm(plane *localkube.Plane, args ...string) string {
	w.t.Helper()
	out, err := w.tryHelm(plane, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// tryHelm is helm for commands that may fail; the error has the standard error.
func (w *world) tryHelm(plane *localkube.Plane, args ...string) (string, error) {
	cmd := w.command(plane, "helm", args...)
	for _, kind := range []string{"CACHE", "CONFIG", "DATA"} {
		cmd.Env = append(cmd.Env, "HELM_"+kind+"_HOME="+filepath.Join(w.dir, "helm", kind))
	}
	return output(cmd)
}

// chartRepository is the directory that `make chart` writes, and its address.
type chartRepository struct {
	dist string
	URL  string
}

// newChartRepository serves the packages that later calls of publishChart write.
func (w *world) newChartRepository() chartRepository {
	w.t.Helper()
	dist := filepath.Join(w.dir, "dist")
	server := httptest.NewServer(http.FileServer(http.Dir(filepath.Join(dist, "charts"))))
	w.t.Cleanup(server.Close)
	return chartRepository{dist: dist, URL: server.URL}
}

// publishChart runs `make chart` for a release of Towline; the repository then has only that release.
func (w *world) publishChart(r chartRepository, version string) {
	w.t.Helper()
	w.runMake("chart", "VERSION="+version, "DIST="+r.dist, "HELM="+w.binary("helm"))
}

// publishFormerChart makes the repository serve only a release of the former chart.
func (w *world) publishFormerChart(r chartRepository, version string) {
	w.t.Helper()
	charts := filepath.Join(r.dist, "charts")
	w.helm(w.hub, "package", "testdata/formerchart", "--version="+strings.TrimPrefix(version, "v"), "--app-version="+version, "--destination="+charts)
	w.helm(w.hub, "repo", "index", charts)
}

// runMake runs make at the root of the repository.
func (w *world) runMake(args ...string) {
	w.t.Helper()
	cmd := exec.CommandContext(w.t.Context(), "make", append([]string{"-C", "../.."}, args...)...)
	// This make must not inherit the flags of the make that runs the tests.
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("make %s: %v\n%s", args[0], err, out)
	}
}
