package archive_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/archive"
)

// tarOf returns a tar archive. A file has as many zero bytes as the size in its header.
func tarOf(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var buffer bytes.Buffer
	writer := tar.NewWriter(&buffer)
	for _, header := range headers {
		header.Mode = 0o600
		if err := writer.WriteHeader(&header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.CopyN(writer, zeros{}, header.Size); err != nil {
			t.Fatal(err)
		}
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

type zeros struct{}

func (zeros) Read(buffer []byte) (int, error) { clear(buffer); return len(buffer), nil }

func gzipOf(t testing.TB, raw []byte) []byte {
	t.Helper()
	var buffer bytes.Buffer
	writer := gzip.NewWriter(&buffer)
	if _, err := writer.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

// zipOf returns a zip archive with one file of size bytes.
func zipOf(t testing.TB, name string, mode fs.FileMode, size int64) []byte {
	t.Helper()
	var buffer bytes.Buffer
	writer := zip.NewWriter(&buffer)
	header := &zip.FileHeader{Name: name, Method: zip.Deflate}
	header.SetMode(mode)
	file, err := writer.CreateHeader(header)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(file, zeros{}, size); err != nil {
		t.Fatal(err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

// zipDirectories returns a zip archive that has only directories.
func zipDirectories(t testing.TB, count int) []byte {
	t.Helper()
	var buffer bytes.Buffer
	writer := zip.NewWriter(&buffer)
	for range count {
		if _, err := writer.CreateHeader(&zip.FileHeader{Name: "d/"}); err != nil {
			t.Fatal(err)
		}
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

func TestReadReturnsTheFiles(t *testing.T) {
	t.Parallel()
	files := tarOf(t, tar.Header{Typeflag: tar.TypeDir, Name: "./base/"}, tar.Header{Name: "./base/a.yaml", Size: 2}, tar.Header{Name: "b", Size: 1})
	want := map[string][]byte{"base/a.yaml": {0, 0}, "b": {0}}
	for name, raw := range map[string][]byte{"tar": files, "tar.gz": gzipOf(t, files)} {
		if got, err := archive.Read(raw, archive.DefaultLimits()); err != nil || !cmp.Equal(got, want) || !archive.IsArchive(raw) {
			t.Errorf("%s: Read() = %v, %v, want %v", name, got, err, want)
		}
	}
	zipped := zipOf(t, "base/a.yaml", 0o600, 2)
	if got, err := archive.Read(zipped, archive.DefaultLimits()); err != nil || !cmp.Equal(got, map[string][]byte{"base/a.yaml": {0, 0}}) || !archive.IsArchive(zipped) {
		t.Errorf("Read(zip) = %v, %v", got, err)
	}
	text := []byte("apiVersion: v1\n")
	if _, err := archive.Read(text, archive.DefaultLimits()); !errors.Is(err, archive.ErrFormat) || archive.IsArchive(text) {
		t.Errorf("Read(text) = %v, want ErrFormat", err)
	}
}

// TestReadAcceptsRecordsOfEachFile: some tools write a header with records, such as precise times, before each file.
func TestReadAcceptsRecordsOfEachFile(t *testing.T) {
	t.Parallel()
	limits := archive.Limits{Files: 1000, Size: 1 << 20}
	headers := make([]tar.Header, limits.Files)
	for i := range headers {
		headers[i] = tar.Header{Name: fmt.Sprint("a/", i), Size: 1, Format: tar.FormatPAX, ModTime: time.Unix(1, 5), AccessTime: time.Unix(1, 5)}
	}
	if got, err := archive.Read(tarOf(t, headers...), limits); err != nil || len(got) != limits.Files {
		t.Errorf("Read() = %d files, %v, want %d", len(got), err, limits.Files)
	}
}

func TestReadRefusesHostileArchives(t *testing.T) {
	t.Parallel()
	limits := archive.Limits{Files: 10, Size: 1 << 20}
	many := make([]tar.Header, 11)
	directories := make([]tar.Header, 5000)
	for i := range many {
		many[i] = tar.Header{Name: strings.Repeat("x", i+1)}
	}
	for i := range directories {
		directories[i] = tar.Header{Typeflag: tar.TypeDir, Name: "d/"}
	}
	tests := map[string]struct {
		raw  []byte
		want string
	}{
		"long headers":     {tarOf(t, tar.Header{Name: "a", PAXRecords: map[string]string{"a.b": strings.Repeat("x", 40<<10)}}), "its headers have more than 30 KiB"},
		"long name":        {gzipOf(t, tarOf(t, tar.Header{Name: strings.Repeat("x", 5000)})), "a file has a name of more than 4 KiB"},
		"long name, link":  {tarOf(t, tar.Header{Typeflag: tar.TypeSymlink, Name: strings.Repeat("x", 5000), Linkname: "x"}), "a file has a name of more than 4 KiB"},
		"zip long name":    {zipOf(t, strings.Repeat("x", 5000), 0o600, 1), "a file has a name of more than 4 KiB"},
		"zip directories":  {zipDirectories(t, 100), "it has more than 10 files"},
		"tar bomb":         {gzipOf(t, tarOf(t, tar.Header{Name: "big", Size: 64 << 20})), `its files have more than 1 MiB (at "big")`},
		"zip bomb":         {zipOf(t, "big", 0o600, 64<<20), `its files have more than 1 MiB (at "big")`},
		"many files":       {tarOf(t, many...), "it has more than 10 files"},
		"many directories": {gzipOf(t, tarOf(t, directories...)), "its headers have more than 30 KiB"},
		"parent":           {tarOf(t, tar.Header{Name: "a/../../etc/passwd"}), `"a/../../etc/passwd" is not a path below the root`},
		"absolute":         {tarOf(t, tar.Header{Name: "/etc/passwd"}), `"/etc/passwd" is not a path below the root`},
		"zip parent":       {zipOf(t, "../x", 0o600, 1), `"../x" is not a path below the root`},
		"backslashes":      {zipOf(t, `..\x`, 0o600, 1), `is not a path below the root`},
		"symbolic link":    {tarOf(t, tar.Header{Typeflag: tar.TypeSymlink, Name: "link", Linkname: "/etc/passwd"}), `"link" is a link or a device`},
		"hard link":        {tarOf(t, tar.Header{Typeflag: tar.TypeLink, Name: "link", Linkname: "/etc/passwd"}), `"link" is a link or a device`},
		"zip link":         {zipOf(t, "link", fs.ModeSymlink|0o777, 1), `"link" is a link or a device`},
		"cut off":          {gzipOf(t, tarOf(t, tar.Header{Name: "a", Size: 5000}))[:30], "read archive: "},
	}
	for name, test := range tests {
		got, err := archive.Read(test.raw, limits)
		if err == nil || got != nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: Read() = %d files, %v, want %q", name, len(got), err, test.want)
		}
	}
}
