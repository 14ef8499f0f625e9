package examples

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

const (
	chartName = "hello"
	chartRoot = "charts/" + chartName
)

// Chart says under which name and version to package the example chart. Everything in the archive follows the name, the group of
// its resource type too, so that charts of different names can be on one cluster. The zero Chart is the chart as it is written.
type Chart struct {
	Name       string // default hello; must be a DNS label
	Version    string // default 0.1.0
	AppVersion string // default 1.0.0
	// Files are added to the archive, or replace what is there; the keys are paths inside the chart.
	Files map[string]string
}

func (c Chart) withDefaults() Chart {
	c.Name = cmp.Or(c.Name, chartName)
	c.Version = cmp.Or(c.Version, "0.1.0")
	c.AppVersion = cmp.Or(c.AppVersion, "1.0.0")
	return c
}

// Archive returns the chart as a Helm archive (gzipped tar). The same Chart has the same bytes.
func (c Chart) Archive() ([]byte, error) {
	c = c.withDefaults()
	content, err := c.content()
	if err != nil {
		return nil, err
	}
	var archive bytes.Buffer
	zipped := gzip.NewWriter(&archive)
	tarred := tar.NewWriter(zipped)
	for _, name := range slices.Sorted(maps.Keys(content)) {
		header := &tar.Header{Name: c.Name + "/" + name, Mode: 0o644, Size: int64(len(content[name])), ModTime: epoch(), Typeflag: tar.TypeReg}
		if err := tarred.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("archive %s: %w", name, err)
		}
		if _, err := tarred.Write(content[name]); err != nil {
			return nil, fmt.Errorf("archive %s: %w", name, err)
		}
	}
	if err := tarred.Close(); err != nil {
		return nil, fmt.Errorf("archive chart %s: %w", c.Name, err)
	}
	if err := zipped.Close(); err != nil {
		return nil, fmt.Errorf("compress chart %s: %w", c.Name, err)
	}
	return archive.Bytes(), nil
}

// epoch is the one time that archives carry: they must not depend on when they were made.
func epoch() time.Time { return time.Unix(0, 0).UTC() }

func (c Chart) content() (map[string][]byte, error) {
	content := map[string][]byte{}
	err := fs.WalkDir(files, chartRoot, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		raw, err := files.ReadFile(name)
		if err != nil {
			return err
		}
		inside := strings.TrimPrefix(name, chartRoot+"/")
		switch {
		case inside == "Chart.yaml":
			raw, err = c.metadata(raw)
		case path.Dir(inside) == "crds":
			raw = bytes.ReplaceAll(raw, []byte(chartName+".examples"), []byte(c.Name+".examples"))
		}
		content[inside] = raw
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the example chart: %w", err)
	}
	for name, text := range c.Files {
		content[name] = []byte(text)
	}
	return content, nil
}

// metadata returns raw, a Chart.yaml, with the name and versions of c.
func (c Chart) metadata(raw []byte) ([]byte, error) {
	var metadata map[string]any
	if err := yaml.Unmarshal(raw, &metadata); err != nil {
		return nil, err
	}
	metadata["name"], metadata["version"], metadata["appVersion"] = c.Name, c.Version, c.AppVersion
	return yaml.Marshal(metadata)
}
