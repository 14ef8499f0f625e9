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
	// maxChartSize limits all files of a chart, with those of the archives of subcharts in it. Helm limits each archive
	// only.
	maxChartSize = 100 << 20
	// maxChartNodes limits the values in the files of a chart that Helm parses when it loads the chart, those of subcharts
	// included. Large charts have some ten thousand.
	maxChartNodes = 1_000_000
	// maxChartEntries limits the files, directories and links of a chart, with those of subcharts: an empty one takes
	// no size, but a KiB of memory. Large charts have some thousand.
	maxChartEntries = 20_000
	// maxChartHeaders limits what an archive has in addition to the data of files. A header can have any number of
	// records.
	maxChartHeaders = 32 << 20
	// maxFieldSize limits the names of files, and the fields of Chart.yaml that the hub keeps in memory and writes to
	// objects.
	maxFieldSize = 1 << 10
	// maxIconSize limits the icon of a chart, which can be a data URI.
	maxIconSize = 64 << 10
)

// chartLimits is what the files of a chart may still take. Helm loads a chart with all its subcharts into memory, and
// parses their values, which can take a hundred times the size of the file.
type chartLimits struct{ size, headers, entries, nodes int }

func newChartLimits() *chartLimits {
	return &chartLimits{size: maxChartSize, headers: maxChartHeaders, entries: maxChartEntries, nodes: maxChartNodes}
}

// addArchive subtracts the files in the archive of a chart that is a subchart of parents charts. It returns an error if
// they exceed a limit, or if one of them cannot be read. It does not report other archives that are invalid: Helm does.
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
			return err // Helm does not read each file, and would load those after it
		}
		if err := l.addFile(header.Name, data, parents); err != nil {
			return err
		}
	}
}

// addFile subtracts a file of a chart that is a subchart of parents charts. It returns an error if the file exceeds a
// limit.
func (l *chartLimits) addFile(name string, data []byte, parents int) error {
	if len(name) > maxFieldSize {
		return fmt.Errorf("a file of the chart has a name of more than %d KiB", maxFieldSize>>10)
	}
	// Helm's loader changes the names in an archive in this way.
	name = path.Clean(strings.ReplaceAll(name, `\`, "/"))
	// Helm keeps the file of a subchart once for each chart above it. So this also limits the depth of subcharts.
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

// iconOf returns the icon of a chart. It returns "" for an icon that is too large: a chart works without it.
func iconOf(metadata *helmchart.Metadata) string {
	if len(metadata.Icon) > maxIconSize {
		return ""
	}
	return metadata.Icon
}
