package source

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	chart "helm.sh/helm/v4/pkg/chart/v2"
	clocktesting "k8s.io/utils/clock/testing"
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
		if _, err := files.add(path); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]bool{"0": true, "1": false, "2": false, "3": true, "4": true, "5": true} {
		if _, err := os.Stat(filepath.Join(dir, name)); (err == nil) != want {
			t.Errorf("file %s: %v, want kept %t", name, err, want)
		}
	}
	// A restart counts the files that are there.
	if _, err := newFileCache(dir, 2*minFileSize); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("%d files after a restart with a smaller limit, %v", len(left), err)
	}
}

// The author of a profile changes its chart again and again.
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
		if _, err := charts.store(last, download{archive: archive, metadata: &chart.Metadata{Name: last.name, Version: "1.0.0"}}); err != nil {
			t.Fatal(err)
		}
		left, err := os.ReadDir(charts.dir)
		if err != nil || len(left) > 10 {
			t.Fatalf("%d files after %d charts, %v", len(left), i+1, err)
		}
	}
	if len(charts.byKey) > 10 {
		t.Errorf("%d charts are known", len(charts.byKey))
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
		charts.keepIndex(fmt.Sprint(i), &index{size: maxIndexes / 4})
	}
	known := 0
	for i := range repositories {
		if charts.knownIndex(fmt.Sprint(i)) != nil {
			known++
		}
	}
	if known != 4 {
		t.Errorf("%d indexes are cached, want 4", known)
	}
	fresh := &index{size: 1}
	if charts.keepIndex(fmt.Sprint(repositories-1), fresh); charts.knownIndex(fmt.Sprint(repositories-1)) != fresh {
		t.Error("a fresh index does not replace the former one")
	}
}
