package release

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/release/common"
	helm "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const (
	// maxRecord is how many bytes of a Secret a record may take. An API server refuses Secrets of more than 1 MiB.
	maxRecord = 1<<20 - 16<<10
	// maxDecoded bounds what a record, which anybody on the cluster may have written, is decompressed to.
	maxDecoded = 256 << 20
)

// ErrTooLarge is the error of a record that does not fit into a Secret.
var ErrTooLarge = errors.New("the release record is larger than a Secret may be")

// manifestTooLarge takes the place of a manifest that does not fit into a Secret.
const manifestTooLarge = "# The manifest is left out: the release record would be larger than a Secret may be.\n"

// New returns the record of one revision of the release of a Helm item, without Info.
func New(item bundle.Item, revision int) (*helm.Release, error) {
	r := item.Release
	record := &helm.Release{
		Name: r.Name, Namespace: r.Namespace, Version: revision, Labels: r.Options.Labels, Info: &helm.Info{Notes: r.Data.Notes},
		Chart:       &chart.Chart{Metadata: &chart.Metadata{Name: r.ChartName, Version: r.ChartVersion, AppVersion: r.AppVersion, Icon: r.Icon}},
		ApplyMethod: string(helm.ApplyMethodServerSideApply),
	}
	if len(r.Data.Chart) > 0 {
		if err := json.Unmarshal(r.Data.Chart, record.Chart.Metadata); err != nil {
			return nil, fmt.Errorf("parse the chart metadata of release %s/%s: %w", r.Namespace, r.Name, err)
		}
	}
	if len(r.Data.Values) > 0 {
		if err := json.Unmarshal(r.Data.Values, &record.Config); err != nil {
			return nil, fmt.Errorf("parse the values of release %s/%s: %w", r.Namespace, r.Name, err)
		}
	}
	var manifest strings.Builder
	for i, object := range item.Objects {
		source := pathOf(item, i)
		if bundle.IsHook(object) || isCRDFile(source) {
			continue
		}
		text, err := yaml.Marshal(object.Object)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", kube.RefOf(object), err)
		}
		fmt.Fprintf(&manifest, "---\n# Source: %s\n%s", source, text)
	}
	record.Manifest = manifest.String()
	for _, h := range ItemHooks(item) {
		text, err := yaml.Marshal(h.Object.Object)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", kube.RefOf(h.Object), err)
		}
		record.Hooks = append(record.Hooks, &helm.Hook{
			Name: h.Object.GetName(), Kind: h.Object.GetKind(), Path: h.Path, Manifest: string(text),
			Events: h.Events, Weight: h.Weight, DeletePolicies: h.DeletePolicies,
		})
	}
	return record, nil
}

// isCRDFile returns whether an object comes from a crds directory of a chart or a subchart: Helm does not count those
// to the manifest.
func isCRDFile(source string) bool {
	_, file, _ := strings.Cut(source, "/") // without the name of the chart
	for {
		sub, ok := strings.CutPrefix(file, "charts/")
		if !ok {
			return strings.HasPrefix(file, "crds/")
		}
		_, file, _ = strings.Cut(sub, "/")
	}
}

// Item returns the manifest and the hooks of a record as a Helm item with the given options.
func Item(record *helm.Release, options bundle.ReleaseOptions) (bundle.Item, error) {
	item := bundle.Item{Release: &bundle.Release{Name: record.Name, Namespace: record.Namespace, Options: options}, Sensitive: true}
	if record.Info != nil {
		item.Release.Data.Notes = record.Info.Notes
	}
	if record.Chart != nil && record.Chart.Metadata != nil {
		m := record.Chart.Metadata
		item.Release.ChartName, item.Release.ChartVersion, item.Release.AppVersion = m.Name, m.Version, m.AppVersion
		raw, err := json.Marshal(m)
		if err != nil {
			return bundle.Item{}, fmt.Errorf("encode the chart metadata of release %s/%s: %w", record.Namespace, record.Name, err)
		}
		item.Release.Data.Chart = raw
	}
	if len(record.Config) > 0 {
		raw, err := json.Marshal(record.Config)
		if err != nil {
			return bundle.Item{}, fmt.Errorf("encode the values of release %s/%s: %w", record.Namespace, record.Name, err)
		}
		item.Release.Data.Values = raw
	}
	add := func(manifest, source string) error {
		objects, err := kube.DecodeLenient([]byte(manifest))
		if err != nil {
			return fmt.Errorf("parse the record of release %s/%s: %w", record.Namespace, record.Name, err)
		}
		for range objects {
			item.Release.Data.Paths = append(item.Release.Data.Paths, source)
		}
		item.Objects = append(item.Objects, objects...)
		return nil
	}
	if err := add(record.Manifest, ""); err != nil {
		return bundle.Item{}, err
	}
	for _, h := range record.Hooks {
		if err := add(h.Manifest, h.Path); err != nil {
			return bundle.Item{}, err
		}
	}
	return item, nil
}

// HasManifest returns whether a record has the manifest of its release.
func HasManifest(record *helm.Release) bool { return record.Manifest != manifestTooLarge }

// Objects returns the objects in the manifest of a record.
func Objects(record *helm.Release) ([]*unstructured.Unstructured, error) {
	objects, err := kube.DecodeLenient([]byte(record.Manifest))
	if err != nil {
		return nil, fmt.Errorf("parse the record of release %s/%s: %w", record.Namespace, record.Name, err)
	}
	return objects, nil
}

// SetStatus sets what `helm list` and `helm status` show of a revision.
func SetStatus(record *helm.Release, status common.Status, description string, firstDeployed, now time.Time) {
	if record.Info == nil {
		record.Info = &helm.Info{}
	}
	record.Info.Status, record.Info.Description = status, description
	record.Info.FirstDeployed, record.Info.LastDeployed = firstDeployed, now
}

// encode returns a record as Helm stores it: JSON, compressed with gzip, in base64. The manifest is left out of one that is too large.
func encode(record *helm.Release) ([]byte, error) {
	encoded, err := encodeWhole(record)
	if err != nil || len(encoded) <= maxRecord {
		return encoded, err
	}
	short := *record
	if record.Chart != nil {
		// Records of Helm have the chart's templates and files, too.
		short.Chart = &chart.Chart{Metadata: record.Chart.Metadata, Values: record.Chart.Values}
	}
	if encoded, err = encodeWhole(&short); err != nil || len(encoded) <= maxRecord {
		return encoded, err
	}
	short.Manifest = manifestTooLarge
	if encoded, err = encodeWhole(&short); err == nil && len(encoded) > maxRecord {
		return nil, fmt.Errorf("%w: that of %s/%s takes %d bytes without its manifest", ErrTooLarge, record.Namespace, record.Name, len(encoded))
	}
	return encoded, err
}

func encodeWhole(record *helm.Release) ([]byte, error) {
	raw, err := json.Marshal(record)
	if err != nil {
		return nil, fmt.Errorf("encode the record of release %s/%s: %w", record.Namespace, record.Name, err)
	}
	var packed bytes.Buffer
	writer, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return nil, fmt.Errorf("compress the record of release %s/%s: %w", record.Namespace, record.Name, err)
	}
	// A bytes.Buffer takes everything.
	_, _ = writer.Write(raw)
	if err := writer.Close(); err != nil {
		return nil, fmt.Errorf("compress the record of release %s/%s: %w", record.Namespace, record.Name, err)
	}
	return []byte(base64.StdEncoding.EncodeToString(packed.Bytes())), nil
}

// decode is the reverse of encode.
func decode(encoded []byte) (*helm.Release, error) {
	packed, err := base64.StdEncoding.DecodeString(string(encoded))
	if err != nil {
		return nil, fmt.Errorf("decode base64: %w", err)
	}
	reader, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	raw, err := io.ReadAll(io.LimitReader(reader, maxDecoded))
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	record := &helm.Release{}
	if err := json.Unmarshal(raw, record); err != nil {
		return nil, fmt.Errorf("decode JSON: %w", err)
	}
	return record, nil
}
