package release

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	goyaml "go.yaml.in/yaml/v2"
	"golang.org/x/sync/errgroup"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/release/common"
	helm "helm.sh/helm/v4/pkg/release/v1"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const (
	// maxEncodedBytes is the maximum size of an encoded record. The API server rejects Secrets of more than 1 MiB.
	maxEncodedBytes = 1<<20 - 16<<10
	// maxStoredBytes is the maximum size of the data of a Secret.
	maxStoredBytes = 1 << 20
	// maxDecodedBytes is the maximum size of a decompressed record, which is untrusted input. It is forty times the size
	// of the largest encoded record. Decoding the JSON can take a hundred times its size, which Store.Memory limits.
	maxDecodedBytes = 32 << 20
)

// errInvalid is wrapped by the errors of decode for input that is not an encoded record.
var errInvalid = errors.New("it is not a release record")

// ErrTooLarge is the error of a record that does not fit into a Secret.
var ErrTooLarge = errors.New("the release record is larger than a Secret may be")

// manifestTooLarge is the manifest of a record that would not fit into a Secret with its own manifest.
const manifestTooLarge = "# The manifest is left out: the release record would be larger than a Secret may be.\n"

// NewRecord returns the record of one revision of the release of a Helm item. Its Info has only the notes: the caller
// sets the rest with SetInfo.
func NewRecord(item bundle.Item, revision int) (*helm.Release, error) {
	r := item.Release
	metadata := &chart.Metadata{Name: r.ChartName, Version: r.ChartVersion, AppVersion: r.AppVersion, Icon: r.Icon}
	record := &helm.Release{
		Name: r.Name, Namespace: r.Namespace, Version: revision, Labels: r.Options.Labels,
		Info:        &helm.Info{Notes: r.Data.Notes},
		Chart:       &chart.Chart{Metadata: metadata},
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
	if len(r.Data.Defaults) > 0 {
		if err := json.Unmarshal(r.Data.Defaults, &record.Chart.Values); err != nil {
			return nil, fmt.Errorf("parse the default values of release %s/%s: %w", r.Namespace, r.Name, err)
		}
	}
	documents := make([]string, len(item.Objects))
	var work errgroup.Group
	work.SetLimit(runtime.GOMAXPROCS(0))
	for i, object := range item.Objects {
		source := pathOf(item, i)
		if bundle.IsHook(object) || isCRDFile(source) {
			continue
		}
		work.Go(func() error {
			text, err := goyaml.Marshal(object.Object)
			if err != nil {
				return fmt.Errorf("encode %s: %w", kube.RefOf(object), err)
			}
			documents[i] = fmt.Sprintf("---\n# Source: %s\n%s", source, text)
			return nil
		})
	}
	if err := work.Wait(); err != nil {
		return nil, err
	}
	record.Manifest = strings.Join(documents, "")
	for _, h := range ItemHooks(item) {
		text, err := goyaml.Marshal(h.Object.Object)
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

// IsFromCRDFile returns whether object i of a Helm item comes from a crds directory of the chart or a subchart. The
// manifest of Helm has no such objects, and helm upgrade does not change them.
func IsFromCRDFile(item bundle.Item, i int) bool { return isCRDFile(pathOf(item, i)) }

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

// HasManifest returns whether a record has the manifest of its release. Otherwise the release cannot be rolled back to
// it.
func HasManifest(record *helm.Release) bool { return record.Manifest != manifestTooLarge }

// SetInfo sets the status, the description and the times of a revision, which `helm list` and `helm status` print.
func SetInfo(record *helm.Release, status common.Status, description string, firstDeployed, now time.Time) {
	if record.Info == nil {
		record.Info = &helm.Info{}
	}
	record.Info.Status, record.Info.Description = status, description
	record.Info.FirstDeployed, record.Info.LastDeployed = firstDeployed, now
}

// encode returns a record as Helm stores it. From a record that is too large it removes the templates and files of the
// chart, then the default values, and then the manifest. It fails with ErrTooLarge if that is not enough.
func encode(record *helm.Release) ([]byte, error) {
	encoded, err := encodeUnlimited(record)
	if err != nil || len(encoded) <= maxEncodedBytes {
		return encoded, err
	}
	reduced := *record
	if record.Chart != nil {
		// Only records that the helm command wrote have templates and files.
		reduced.Chart = &chart.Chart{Metadata: record.Chart.Metadata, Values: record.Chart.Values}
	}
	if encoded, err = encodeUnlimited(&reduced); err != nil || len(encoded) <= maxEncodedBytes {
		return encoded, err
	}
	if reduced.Chart != nil {
		reduced.Chart = &chart.Chart{Metadata: reduced.Chart.Metadata}
	}
	if encoded, err = encodeUnlimited(&reduced); err != nil || len(encoded) <= maxEncodedBytes {
		return encoded, err
	}
	reduced.Manifest = manifestTooLarge
	if encoded, err = encodeUnlimited(&reduced); err == nil && len(encoded) > maxEncodedBytes {
		return nil, fmt.Errorf("%w: release %s/%s needs %d bytes without its manifest",
			ErrTooLarge, record.Namespace, record.Name, len(encoded))
	}
	return encoded, err
}

// encodeUnlimited returns a record of any size as JSON, compressed with gzip, in base64.
func encodeUnlimited(record *helm.Release) ([]byte, error) {
	raw, err := json.Marshal(record)
	if err != nil {
		return nil, fmt.Errorf("encode the record of release %s/%s: %w", record.Namespace, record.Name, err)
	}
	var packed bytes.Buffer
	writer, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return nil, fmt.Errorf("compress the record of release %s/%s: %w", record.Namespace, record.Name, err)
	}
	// Writing to a bytes.Buffer cannot fail.
	_, _ = writer.Write(raw)
	if err := writer.Close(); err != nil {
		return nil, fmt.Errorf("compress the record of release %s/%s: %w", record.Namespace, record.Name, err)
	}
	return []byte(base64.StdEncoding.EncodeToString(packed.Bytes())), nil
}
