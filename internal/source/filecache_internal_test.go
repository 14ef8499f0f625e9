package source

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	chart "helm.sh/helm/v4/pkg/chart/v2"
	"k8s.io/apimachinery/pkg/util/wait"
	clocktesting "k8s.io/utils/clock/testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/kube"
)

func TestLeastRecentlyUsedFilesAreDeleted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	files, err := newFileCache(dir, 5*minFileSize)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		path := filepath.Join(dir, fmt.Sprint(i))
		if err := os.WriteFile(path, []byte("a"), 0o600); err != nil {
			t.Fatal(err)
		}
		used := time.Now().Add(time.Duration(i-10) * time.Hour)
		if err := os.Chtimes(path, used, used); err != nil {
			t.Fatal(err)
		}
		if i == 4 {
			files.touch(filepath.Join(dir, "0"))
		}
		if err := files.add(path); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]bool{"0": true, "1": false, "2": false, "3": true, "4": true, "5": true} {
		if _, err := os.Stat(filepath.Join(dir, name)); (err == nil) != want {
			t.Errorf("file %s: %v, want kept %t", name, err, want)
		}
	}
	// After a restart, the cache counts the existing files.
	if _, err := newFileCache(dir, 2*minFileSize); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("%d files after a restart with a smaller limit, %v", len(left), err)
	}
}

// The author of a profile changes its chart many times.
func TestChartFilesHaveALimit(t *testing.T) {
	t.Parallel()
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	charts.files.limit = 10 * minFileSize
	var last chartRequest
	for i := range 50 {
		last = chartRequest{repositoryURL: "https://example.com", name: fmt.Sprint(i), version: "1.0.0"}
		archive := bytes.Repeat([]byte{byte(i)}, minFileSize)
		if _, err := charts.store(last, downloadedChart{archive: archive, metadata: &chart.Metadata{Name: last.name, Version: "1.0.0"}}); err != nil {
			t.Fatal(err)
		}
		left, err := os.ReadDir(charts.dir)
		if err != nil || len(left) > 10 {
			t.Fatalf("%d files after %d charts, %v", len(left), i+1, err)
		}
	}
	if _, ok := charts.cached(chartRequest{repositoryURL: last.repositoryURL, name: "0", version: last.version}); ok {
		t.Error("the first chart is cached without its files")
	}
	if _, ok := charts.cached(last); !ok {
		t.Error("the last chart is deleted")
	}
}

// The author of profiles refers to many repositories with large indexes.
func TestIndexesHaveALimit(t *testing.T) {
	t.Parallel()
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	const repositories = 20
	for i := range repositories {
		charts.cacheIndex(fmt.Sprint(i), &index{size: maxIndexesSize / 4})
	}
	known := 0
	for i := range repositories {
		if charts.cachedIndex(fmt.Sprint(i)) != nil {
			known++
		}
	}
	if known != 4 {
		t.Errorf("%d indexes are cached, want 4", known)
	}
	fresh := &index{size: 1}
	if charts.cacheIndex(fmt.Sprint(repositories-1), fresh); charts.cachedIndex(fmt.Sprint(repositories-1)) != fresh {
		t.Error("a fresh index does not replace the former one")
	}
}

// An index of two-byte values needs much more memory than its size.
func TestIndexesOfManyValues(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]struct{ begin, value string }{
		"JSON": {`{"entries":{"a":[`, "{},"}, "flow style": {"entries: {a: [", "{},"}, "lines": {"entries:\n  a:\n", "  - {}\n"}, "nested": {"entries:\n  a: ", "- "}, "keys": {"entries: {a: [{", "a: ,"},
	} {
		raw := []byte(text.begin + strings.Repeat(text.value, maxIndex/2/len(text.value)))
		before := time.Now()
		if _, err := parseIndex(raw); err == nil || !strings.Contains(err.Error(), "values") {
			t.Errorf("%s: got error %v, want an error about the number of values", name, err)
		}
		if took := time.Since(before); took > 10*time.Second {
			t.Errorf("%s: the parser needed %s", name, took)
		}
	}
	aliases := "x: &a " + strings.Repeat("x", 50<<10) + "\nentries: {a: [{urls: [" + strings.Repeat("*a, ", 2000) + "]}]}\n"
	if _, err := parseIndex([]byte(aliases)); err == nil || !strings.Contains(err.Error(), "values") {
		t.Errorf("aliases: got error %v, want an error about the number of values", err)
	}
	// The largest public indexes have less than one million lines.
	var large strings.Builder
	large.WriteString("apiVersion: v1\nentries:\n  a:\n")
	for i := range 100_000 {
		fmt.Fprintf(&large, "  - apiVersion: v2\n    created: \"2026-01-01T00:00:00Z\"\n    description: a, b - c\n    digest: %064x\n    name: a\n    urls:\n    - https://example.com/a-1.0.%d.tgz\n    version: 1.0.%[1]d\n", i, i)
	}
	if nodes := kube.CountValues([]byte(large.String())); nodes > maxIndexNodes*8/10 {
		t.Errorf("an index of 800,000 lines has %d values by this count", nodes)
	}
}

// Two repositories stop in the middle of their index.
func TestFetchesHaveALimit(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(bytes.Repeat([]byte(" "), 700<<10))
		_ = http.NewResponseController(w).Flush()
		<-release
	}))
	t.Cleanup(server.Close)
	end := sync.OnceFunc(func() { close(release) })
	t.Cleanup(end)
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	charts.limits.total = 1 << 20
	fetch := func(repository string) error {
		chart := configv1beta1.HelmChart{RepositoryURL: server.URL + "/" + repository, RepositoryName: repository, ChartName: "a", ChartVersion: "1.0.0"}
		_, err := charts.Fetch(t.Context(), chart, Login{}, Verification{}, nil)
		return err
	}
	if _, isPending := errors.AsType[*PendingError](fetch("first")); !isPending {
		t.Fatal("the first repository responds")
	}
	eventually := func(what string, condition func() bool) {
		err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return condition(), nil })
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	eventually("the limit of all fetches", func() bool {
		err := fetch("second")
		return err != nil && strings.Contains(err.Error(), "the charts and indexes that are being fetched have more than 1 MiB")
	})
	end()
	eventually("the end of the fetches", func() bool { return charts.limits.used.Load() == 0 })
}

// archiveOf returns the archive of a chart with these files.
func archiveOf(t testing.TB, files map[string]string) []byte {
	t.Helper()
	var archived bytes.Buffer
	zipped := gzip.NewWriter(&archived)
	writer := tar.NewWriter(zipped)
	for name, text := range files {
		if err := writer.WriteHeader(&tar.Header{Name: "a/" + name, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := writer.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	for _, closer := range []io.Closer{writer, zipped} {
		if err := closer.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return archived.Bytes()
}

// A chart of a few KiB may need much more memory than Helm's limits allow for archives.
func TestChartsThatTakeMuchMemory(t *testing.T) {
	t.Parallel()
	chartFile := "apiVersion: v2\nname: a\nversion: 1.0.0\n"
	values := "a: [" + strings.Repeat("{},", 1<<20) + "]"
	aliases := "x: &a " + strings.Repeat("x", 50<<10) + "\na: [" + strings.Repeat("*a, ", 2000) + "]\n"
	zeros := archiveOf(t, map[string]string{"Chart.yaml": chartFile, "zeros": strings.Repeat("\x00", 4<<20)})
	subcharts := map[string]string{"Chart.yaml": chartFile}
	for i := range 30 {
		subcharts[fmt.Sprintf("charts/%d.tgz", i)] = string(zeros)
	}
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		files map[string]string
		want  string
	}{
		"values":               {map[string]string{"Chart.yaml": chartFile, "values.yaml": values}, "more than 1000000 values"},
		"metadata":             {map[string]string{"Chart.yaml": chartFile + "annotations: {" + strings.Repeat("a: ,", 600_000) + "}"}, "more than 1000000 values"},
		"aliases":              {map[string]string{"Chart.yaml": chartFile, "values.yaml": "a: b\n---\n" + aliases}, "more than 1000000 values"},
		"aliases in metadata":  {map[string]string{"Chart.yaml": chartFile + aliases}, "more than 1000000 values"},
		"values of a subchart": {map[string]string{"Chart.yaml": chartFile, "charts/b/values.yaml": values}, "more than 1000000 values"},
		"values in an archive": {map[string]string{"Chart.yaml": chartFile, "charts/b.tgz": string(archiveOf(t, map[string]string{"values.yaml": values}))}, "more than 1000000 values"},
		// Helm loads both files as values.yaml.
		"values behind \\":      {map[string]string{"Chart.yaml": chartFile, `b\values.yaml`: values}, "more than 1000000 values"},
		"values before /.":      {map[string]string{"Chart.yaml": chartFile, "values.yaml/.": values}, "more than 1000000 values"},
		"subcharts before /.":   {map[string]string{"Chart.yaml": chartFile, "charts/b.tgz/.": string(archiveOf(t, map[string]string{"values.yaml": values}))}, "more than 1000000 values"},
		"archives of subcharts": {subcharts, "the chart and its subcharts have more than 100 MiB"},
		"archives in archives":  {map[string]string{"Chart.yaml": chartFile, "charts/b.tgz": string(archiveOf(t, subcharts))}, "the chart and its subcharts have more than 100 MiB"},
	} {
		if _, err := charts.loadMetadata(archiveOf(t, test.files)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got error %v, want %q", name, err, test.want)
		}
		var files []File
		for file, text := range test.files {
			files = append(files, File{Name: file, Data: []byte(text)})
		}
		if _, err := charts.packageChart(files, ""); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s, from a source of Flux: got error %v, want %q", name, err, test.want)
		}
	}
	if metadata, err := charts.loadMetadata(archiveOf(t, map[string]string{"Chart.yaml": chartFile, "values.yaml": "a: [1, 2]"})); err != nil || metadata.Name != "a" {
		t.Errorf("a chart: %+v, %v", metadata, err)
	}
}

// Helm has no limit for the fields of Chart.yaml that the hub keeps. requirements.yaml can also set them.
func TestChartsWithLongFieldsAreRefused(t *testing.T) {
	t.Parallel()
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	errorsOf := func(files map[string]string) map[string]error {
		var fluxFiles []File
		for file, text := range files {
			fluxFiles = append(fluxFiles, File{Name: file, Data: []byte(text)})
		}
		_, ofRepository := charts.loadMetadata(archiveOf(t, files))
		_, ofFlux := charts.packageChart(fluxFiles, "")
		return map[string]error{"a repository": ofRepository, "a source of Flux": ofFlux}
	}
	for name, test := range map[string]struct{ field, format string }{
		"name":            {"name", "name: %s\nversion: 1.0.0\n"},
		"path as name":    {"name", "name: ../%s\nversion: 1.0.0\n"},
		"version":         {"version", "name: a\nversion: 1.0.0-%s\n"},
		"invalid version": {"version", "name: a\nversion: \"%s\"\n"},
		"appVersion":      {"appVersion", "name: a\nversion: 1.0.0\nappVersion: \"%s\"\n"},
		"kubeVersion":     {"kubeVersion", "name: a\nversion: 1.0.0\nkubeVersion: \">=1.%s\"\n"},
	} {
		for _, file := range []string{"Chart.yaml", "requirements.yaml"} {
			files := map[string]string{"Chart.yaml": "apiVersion: v1\nname: a\nversion: 1.0.0\n"}
			files[file] = "apiVersion: v1\n" + fmt.Sprintf(test.format, strings.Repeat("1", 1<<10+1))
			for origin, err := range errorsOf(files) {
				if want := test.field + " of the chart has more than 1 KiB"; err == nil || err.Error() != want {
					t.Errorf("%s in %s, from %s: got error %.100q, want %q", name, file, origin, fmt.Sprint(err), want)
				}
			}
		}
	}
	for origin, err := range errorsOf(map[string]string{"Chart.yaml": "apiVersion: v2\nname: a\nversion: 1.0.0\nappVersion: " + strings.Repeat("a", 1<<10)}) {
		if err != nil {
			t.Errorf("a field of 1 KiB, from %s: %v", origin, err)
		}
	}
}

func TestLargeIconsAreOmitted(t *testing.T) {
	t.Parallel()
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	for size, want := range map[int]int{64 << 10: 64 << 10, 64<<10 + 1: 0} {
		request := chartRequest{repositoryURL: "https://example.com", name: fmt.Sprint(size), version: "1.0.0"}
		stored, err := charts.store(request, downloadedChart{metadata: &chart.Metadata{Icon: strings.Repeat("a", size)}})
		if err != nil || len(stored.Icon) != want {
			t.Errorf("stored icon: got %d bytes for an icon of %d bytes, %v", len(stored.Icon), size, err)
		}
		if cached, ok := charts.cached(request); !ok || cached != stored {
			t.Errorf("cached chart with an icon of %d bytes: got an icon of %d bytes", size, len(cached.Icon))
		}
	}
}

// The hub keeps some charts in memory, and the files of all charts.
func TestChartsInMemoryHaveALimit(t *testing.T) {
	t.Parallel()
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	requestOf := func(i int) chartRequest {
		return chartRequest{repositoryURL: "https://example.com", name: fmt.Sprint(i), version: "1.0.0"}
	}
	const count = 300 // their icons have more than 16 MiB
	for i := range count {
		metadata := &chart.Metadata{Name: fmt.Sprint(i), Icon: strings.Repeat("a", 64<<10)}
		if _, err := charts.store(requestOf(i), downloadedChart{archive: []byte(metadata.Name), metadata: metadata}); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range []int{0, count - 1} {
		if err := os.Remove(charts.entryPath(requestOf(i).key())); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := charts.cached(requestOf(0)); ok {
		t.Error("the first chart is still in memory")
	}
	if _, ok := charts.cached(requestOf(count - 1)); !ok {
		t.Error("the last chart is not in memory")
	}
	if known, ok := charts.cached(requestOf(1)); !ok || known.Name != "1" {
		t.Errorf("a chart that is not in memory: got name %q, %t", known.Name, ok)
	}
}

// A hub was killed while it packaged or stored a chart.
func TestTemporaryFilesOfAKilledHubAreDeleted(t *testing.T) {
	t.Parallel()
	for name, create := range map[string]func(dir string) error{
		"charts": func(dir string) error {
			_, err := NewCharts(dir, clocktesting.NewFakePassiveClock(time.Now()))
			return err
		},
		"artifacts": func(dir string) error {
			_, err := NewArtifacts(dir, clocktesting.NewFakePassiveClock(time.Now()))
			return err
		},
	} {
		dir, old := t.TempDir(), time.Now().Add(-2*temporaryFileTTL)
		for _, file := range []string{"package-1/templates/a.yaml", "partial-1", "package-young/a", "partial-young", "kept.tgz", "sigstore/root.json"} {
			path := filepath.Join(dir, filepath.FromSlash(file))
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte("a"), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		for _, file := range []string{"package-1", "partial-1", "kept.tgz", "sigstore"} {
			if err := os.Chtimes(filepath.Join(dir, file), old, old); err != nil {
				t.Fatal(err)
			}
		}
		if err := create(dir); err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var left []string
		for _, entry := range entries {
			left = append(left, entry.Name())
		}
		if want := "[kept.tgz package-young partial-young sigstore]"; fmt.Sprint(left) != want {
			t.Errorf("%s: the directory has %s, want %s", name, left, want)
		}
	}
}
