package archive_test

import (
	"archive/tar"
	"bytes"
	"maps"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/test/fuzzing"
)

func FuzzRead(f *testing.F) {
	limits := archive.Limits{Files: 20, Size: 64 << 10}
	plain := tarOf(f, tar.Header{Name: "./base/a.yaml", Size: 10}, tar.Header{Name: "base", Typeflag: tar.TypeDir}, tar.Header{Name: "b", Size: 3})
	f.Add(plain)
	f.Add(gzipOf(f, plain))
	f.Add(tarOf(f, tar.Header{Name: "../a", Size: 1}))
	f.Add(tarOf(f, tar.Header{Name: "link", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}))
	f.Add(gzipOf(f, tarOf(f, tar.Header{Name: "large", Size: 100 << 10})))
	f.Add(zipOf(f, "base/a.yaml", 0o600, 10))
	f.Add(zipOf(f, "large", 0o600, 100<<10))
	f.Add(zipDirectories(f, 1000))
	f.Add(tarOf(f, tar.Header{Name: "a", PAXRecords: map[string]string{"a.b": "c"}}))
	f.Fuzz(func(t *testing.T, data []byte) {
		var files map[string][]byte
		var err error
		fuzzing.Within(t, uint64(limits.Size)*40+uint64(len(data))*20, func() { files, err = archive.Read(data, limits) })
		if err != nil {
			fuzzing.OneLine(t, err)
			return
		}
		checkFiles(t, files, limits)
		if len(files) == 0 {
			return // a tar archive without files has no magic number
		}
		again, err := archive.Read(tarOfFiles(t, files), archive.DefaultLimits()) // long names have larger headers there
		if err != nil {
			t.Fatalf("the files of an archive are no archive: %v", err)
		}
		if diff := cmp.Diff(files, again); diff != "" {
			t.Errorf("other files after writing and reading (-first +second):\n%s", diff)
		}
	})
}

// checkFiles checks that files are within limits and below the root.
func checkFiles(t *testing.T, files map[string][]byte, limits archive.Limits) {
	t.Helper()
	size := 0
	for name, content := range files {
		size += len(content)
		if !filepath.IsLocal(name) || filepath.Clean(name) != name {
			t.Errorf("%q is not a clean path below the root", name)
		}
	}
	if len(files) > limits.Files || int64(size) > limits.Size {
		t.Errorf("got %d files of %d bytes, want at most %+v", len(files), size, limits)
	}
}

func tarOfFiles(t *testing.T, files map[string][]byte) []byte {
	t.Helper()
	var raw bytes.Buffer
	writer := tar.NewWriter(&raw)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		header := &tar.Header{Name: name, Size: int64(len(files[name])), Mode: 0o600, Typeflag: tar.TypeReg, Format: tar.FormatGNU}
		if err := writer.WriteHeader(header); err != nil {
			t.Skip("the name cannot be written") // for example, not UTF-8
		}
		if _, err := writer.Write(files[name]); err != nil {
			t.Fatal(err)
		}
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return raw.Bytes()
}
