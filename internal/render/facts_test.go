package render_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

// The author of a profile changes its chart again and again. The hub reads the facts of a chart from its archive, until
// it has deleted them from memory.
func TestFactsOfChartsHaveALimit(t *testing.T) {
	t.Parallel()
	charts := render.NewCharts(nil)
	requestOf := func(path string) render.ChartRequest {
		return render.ChartRequest{Chart: source.Chart{Name: "hello", Version: "0.1.0", Path: path, Digest: filepath.Base(path)}}
	}
	dir := t.TempDir()
	var paths []string
	for i := range 6 {
		metadata := "apiVersion: v2\nname: hello\nversion: 0.1.0\nkubeVersion: '>=1.2" + strings.Repeat(" ", 1<<20) + "'\n"
		archive, err := examples.Chart{Files: map[string]string{"Chart.yaml": metadata}}.Archive()
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, fmt.Sprint(i))
		if err := os.WriteFile(path, archive, 0o600); err != nil {
			t.Fatal(err)
		}
		if readsVersion, _, err := charts.ReadsCapabilities(requestOf(path)); err != nil || !readsVersion {
			t.Fatalf("chart %d: got %t, %v", i, readsVersion, err)
		}
		paths = append(paths, path)
	}
	for _, path := range paths {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := charts.ReadsCapabilities(requestOf(paths[5])); err != nil {
		t.Errorf("the facts of the last chart are not cached: %v", err)
	}
	if _, _, err := charts.ReadsCapabilities(requestOf(paths[0])); err == nil {
		t.Error("the facts of 6 charts, of 1 MiB each, are cached")
	}
}
