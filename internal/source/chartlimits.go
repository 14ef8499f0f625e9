package source

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"strings"

	helmchart "helm.sh/helm/v4/pkg/chart/v2"

	"github.com/towline/towline/internal/kube"
)

const (
	// maxChartSize limits the bytes of all files of a chart and its subcharts. Helm limits each archive separately.
	maxChartSize = 100 << 20
	// maxChartNodes limits the YAML values in the files that Helm parses when it loads a chart and its subcharts. Large
	// charts have some ten thousand.
	maxChartNodes = 1_000_000
	// maxChartEntries limits the files, directories and links of a chart and its subcharts: an empty one has no size, but
	// takes a KiB of memory. Large charts have some thousand.
	maxChartEntries = 20_000
	// maxChartHeaders limits the bytes of the tar headers in an archive, since a header can have any number of records.
	maxChartHeaders = 32 << 20
	// maxFieldSize limits the bytes of file names, and of the fields of Chart.yaml that the hub keeps in memory and writes
	// to objects.
	maxFieldSize = 1 << 10
	// maxIconSize limits the bytes of the icon of a chart, which can be a data URI.
	maxIconSize = 64 << 10
)

// chartLimits has the bytes, entries and values that further files of a chart may have. Helm loads a chart with all its
// subcharts into memory. Parsed values can take a hundred times the size of their file.
type chartLimits struct{ size, headers, entries, nodes int }

func newChartLimits() *chartLimits {
	return &chartLimits{size: maxChartSize, headers: maxChartHeaders, entries: maxChartEntries, nodes: maxChartNodes}
}

// addArchive subtracts the files in the archive of a chart. parents is the number of charts above it. It returns an
// error if the files exceed a limit, or if a file cannot be read. Helm reports archives that are invalid otherwise.
func (l *chartLimits) addArchive(raw []byte, parents int) error {
	unzipped, err := gzip.NewReader(bytes.NewReader(raw))
	if err != nil {
		return nil //nolint:nilerr // Helm reports it
	}
	stream := &io.LimitedReader{R: unzipped}
	for files := tar.NewReader(stream); ; {
		stream.N = int64(l.headers)
		header, err := files.Next()
		if l.headers = int(stream.N); l.headers == 0 {
			return fmt.Errorf("the headers in the archive of the chart have more than %d MiB", maxChartHeaders>>20)
		}
		if err != nil {
			return nil //nolint:nilerr // it is the end, or Helm reports it
		}
		stream.N = math.MaxInt64
		data, err := io.ReadAll(io.LimitReader(files, int64(l.size)+1))
		if err != nil {
			return err // Helm skips some files without reading them, and would load the files after this one
		}
		if err := l.addFile(header.Name, data, parents); err != nil {
			return err
		}
	}
}

// addFile subtracts a file of a chart. parents is the number of charts above the chart. It returns an error if the file
// exceeds a limit.
func (l *chartLimits) addFile(name string, data []byte, parents int) error {
	if len(name) > maxFieldSize {
		return fmt.Errorf("a file of the chart has a name of more than %d KiB", maxFieldSize>>10)
	}
	// Helm's loader changes the names in an archive in this way.
	name = path.Clean(strings.ReplaceAll(name, `\`, "/"))
	// Helm keeps the file of a subchart once for each chart above it, so each copy counts. This also limits the depth.
	parents += strings.Count(name, "charts/")
	if l.entries -= 1 + parents; l.entries < 0 {
		return fmt.Errorf("the chart and its subcharts have more than %d files", maxChartEntries)
	}
	if l.size -= len(data); l.size < 0 {
		return fmt.Errorf("the chart and its subcharts have more than %d MiB", maxChartSize>>20)
	}
	switch path.Base(name) {
	case "Chart.yaml", "Chart.lock", "values.yaml", "requirements.yaml", "requirements.lock":
		if l.nodes -= kube.CountValues(data); l.nodes < 0 {
			return fmt.Errorf("the files of the chart and its subcharts have more than %d values", maxChartNodes)
		}
	}
	if path.Ext(name) == ".tgz" {
		return l.addArchive(data, parents)
	}
	return nil
}

// checkLoaded returns an error if a field of a loaded chart is too long, and otherwise err with a limited text. loaded
// and err are the results of Helm's loader, whose errors contain whole fields.
func checkLoaded(loaded *helmchart.Chart, err error) error {
	if err != nil {
		err = errors.New(kube.Truncate(err.Error(), kube.MaxMessage))
	}
	if loaded == nil || loaded.Metadata == nil {
		return err
	}
	for _, field := range []struct{ name, value string }{
		{"name", loaded.Metadata.Name},
		{"version", loaded.Metadata.Version},
		{"appVersion", loaded.Metadata.AppVersion},
		{"kubeVersion", loaded.Metadata.KubeVersion},
	} {
		if len(field.value) > maxFieldSize {
			return fmt.Errorf("%s of the chart has more than %d KiB", field.name, maxFieldSize>>10)
		}
	}
	return err
}

// iconOf returns the icon of a chart, "" if it is too large: a chart works without it.
func iconOf(metadata *helmchart.Metadata) string {
	if len(metadata.Icon) > maxIconSize {
		return ""
	}
	return metadata.Icon
}
