package source

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

const chartYAML = "apiVersion: v2\nname: a\nversion: 1.0.0\n"

// rawChart returns a tar archive with a Chart.yaml and count copies of an entry.
func rawChart(t testing.TB, count int, entry tar.Header) []byte {
	t.Helper()
	var chart, copied bytes.Buffer
	writer := tar.NewWriter(&chart)
	err := writer.WriteHeader(&tar.Header{Name: "a/Chart.yaml", Mode: 0o644, Size: int64(len(chartYAML))})
	if err == nil {
		_, err = writer.Write([]byte(chartYAML))
	}
	if err == nil {
		err = writer.Flush()
	}
	if err == nil {
		err = tar.NewWriter(&copied).WriteHeader(&entry)
	}
	if err != nil {
		t.Fatal(err)
	}
	for range count {
		chart.Write(copied.Bytes())
	}
	chart.Write(make([]byte, 1024))
	return chart.Bytes()
}

// zipped returns data that is compressed by gzip.
func zipped(t testing.TB, raw []byte) []byte {
	t.Helper()
	var packed bytes.Buffer
	writer, err := gzip.NewWriterLevel(&packed, gzip.BestSpeed)
	if err == nil {
		_, err = writer.Write(raw)
	}
	if err == nil {
		err = writer.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return packed.Bytes()
}

// recordsOf returns PAX records with size bytes.
func recordsOf(size int) map[string]string {
	records := map[string]string{}
	for i := range size / 16 {
		records[fmt.Sprintf("a.%06d", i)] = "b"
	}
	return records
}

// Because of its mode, Helm handles a sparse file as a directory and skips its data, which is not readable.
func TestChartArchivesWithAnUnreadableFile(t *testing.T) {
	t.Parallel()
	var sparse bytes.Buffer
	writer := tar.NewWriter(&sparse)
	err := writer.WriteHeader(&tar.Header{Name: "a/d", Mode: 0o40755, Size: 512, Format: tar.FormatGNU})
	if err == nil {
		_, err = writer.Write(make([]byte, 512))
	}
	if err != nil {
		t.Fatal(err)
	}
	header := sparse.Bytes()
	header[156] = tar.TypeGNUSparse
	copy(header[148:156], "        ")
	sum := 0
	for _, b := range header[:512] {
		sum += int(b)
	}
	copy(header[148:156], fmt.Sprintf("%06o\x00 ", sum))
	raw := zipped(t, append(bytes.Clone(header), rawChart(t, maxChartEntries, tar.Header{Name: "a/b", Mode: 0o644})...))
	if _, err := (&Charts{}).loadMetadata(raw); err == nil {
		t.Error("a chart with too many files after a sparse file is accepted")
	}
}

// The entries and headers of a chart of a few MiB without content need much time and memory. The hub loads charts in
// sequence, so such a chart would delay the charts of other tenants.
func TestChartArchivesOfManyEntries(t *testing.T) { //nolint:paralleltest // measures memory
	const manyFiles, long, headers = "more than 20000 files", "a name of more than 1 KiB", "headers in the archive of the chart have more than 32 MiB"
	empty := tar.Header{Name: "a/b", Mode: 0o644}
	inArchives := func(depth int) []byte {
		raw := zipped(t, rawChart(t, 0, empty))
		for range depth {
			raw = archiveOf(t, map[string]string{"Chart.yaml": chartYAML, "charts/b.tgz": string(raw)})
		}
		return raw
	}
	large := rawChart(t, 1, tar.Header{Name: "a/b", Mode: 0o644, PAXRecords: recordsOf(900 << 10)})
	// The header of a file that is missing in the archive.
	onlyRecords := large[1024 : len(large)-1024-512]
	endless := append(bytes.Clone(large[:1024]), bytes.Repeat(onlyRecords, 60)...)
	for name, test := range map[string]struct {
		raw  []byte
		want string
	}{
		"empty entries":               {zipped(t, rawChart(t, 50_000, empty)), manyFiles},
		"directories":                 {zipped(t, rawChart(t, 50_000, tar.Header{Name: "a/b/", Typeflag: tar.TypeDir, Mode: 0o755})), manyFiles},
		"links":                       {zipped(t, rawChart(t, 50_000, tar.Header{Name: "a/b", Typeflag: tar.TypeSymlink, Linkname: "c"})), manyFiles},
		"empty entries in a subchart": {archiveOf(t, map[string]string{"Chart.yaml": chartYAML, "charts/b.tgz": string(zipped(t, rawChart(t, 50_000, empty)))}), manyFiles},
		// Helm keeps the file of a subchart in all its parent charts.
		"files of nested charts": {zipped(t, rawChart(t, 1000, tar.Header{Name: "a/" + strings.Repeat("charts/b/", 100) + "c", Mode: 0o644})), manyFiles},
		"archives in archives":   {inArchives(250), manyFiles},
		"long names":             {zipped(t, rawChart(t, 1, tar.Header{Name: "a/" + strings.Repeat("b", 2000), Mode: 0o644})), long},
		"large headers":          {zipped(t, bytes.Join([][]byte{large[:1024], bytes.Repeat(large[1024:len(large)-1024], 60), make([]byte, 1024)}, nil)), headers},
		"headers without a file": {zipped(t, endless), headers},
	} {
		fuzzing.Within(t, 1<<30, func() {
			if _, err := (&Charts{}).loadMetadata(test.raw); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%s (%d KiB): got error %.200q, want %q", name, len(test.raw)>>10, fmt.Sprint(err), test.want)
			}
		})
	}
	// The largest public charts have several thousand files.
	for name, raw := range map[string][]byte{"files": zipped(t, rawChart(t, 10_000, empty)), "subcharts": inArchives(5)} {
		if _, err := (&Charts{}).loadMetadata(raw); err != nil {
			t.Errorf("a chart with many %s: %v", name, err)
		}
	}
	// In a source of Flux, the parent directories of the chart are no charts.
	const deep = "charts/b/"
	for below, want := range map[string]string{"": "", strings.Repeat(deep, 100): manyFiles} {
		above := strings.Repeat(deep, 100)
		files := []File{{Name: above + "a/Chart.yaml", Data: []byte(chartYAML)}}
		for i := range 250 {
			files = append(files, File{Name: fmt.Sprintf("%sa/%s%d", above, below, i)})
		}
		charts := &Charts{dir: t.TempDir()}
		if _, err := charts.packageChart(files, above+"a"); !strings.Contains(errorText(err), want) || want == "" && err != nil {
			t.Errorf("files of a source of Flux in %q: got error %v, want %q", below, err, want)
		}
	}
}

func TestErrorsOfHelmAreLimited(t *testing.T) {
	t.Parallel()
	if err := checkLoaded(nil, errors.New(strings.Repeat("x", 1<<20))); err == nil || len(err.Error()) > kube.MaxMessage {
		t.Error("the text of the error has no limit")
	}
}
