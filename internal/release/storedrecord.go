package release

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"slices"

	helm "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const (
	// firstPart is the size of the first part of a record that is decompressed, in bytes. The parts double.
	firstPart = 256 << 10
	// encodedByteCost is the memory that encoding a record again needs for each byte of its JSON. escapedBytes is the size
	// of a character that encoding/json escapes.
	encodedByteCost = 4
	escapedBytes    = 6
)

// StoredRecord is a record that Store.Get has read. It reserves memory for the record and for the result of the last
// method that was called. The caller must close it after the last use of both.
type StoredRecord struct {
	*helm.Release

	memory *kube.Reservation
	// size is the memory for the record alone, in bytes.
	size int64
}

// Close releases the memory. It does nothing if r is nil.
func (r *StoredRecord) Close() {
	if r != nil {
		r.memory.Close()
	}
}

// Item returns a Helm item that deploys the record again, with the given options. Its objects are the objects of the
// manifest, without template paths, and then the hooks.
func (r *StoredRecord) Item(ctx context.Context, options bundle.ReleaseOptions) (bundle.Item, error) {
	if err := r.reserve(ctx, memoryOfManifest(r.Manifest)+memoryOfHooks(r.Hooks)); err != nil {
		return bundle.Item{}, err
	}
	return itemOf(r.Release, options)
}

func itemOf(record *helm.Release, options bundle.ReleaseOptions) (bundle.Item, error) {
	item := bundle.Item{
		Release:   &bundle.Release{Name: record.Name, Namespace: record.Namespace, Options: options},
		Sensitive: true,
	}
	if record.Info != nil {
		item.Release.Data.Notes = record.Info.Notes
	}
	if record.Chart != nil && record.Chart.Metadata != nil {
		m := record.Chart.Metadata
		item.Release.ChartName, item.Release.ChartVersion, item.Release.AppVersion = m.Name, m.Version, m.AppVersion
		raw, err := json.Marshal(m)
		if err != nil {
			return bundle.Item{}, fmt.Errorf("encode the chart metadata of release %s/%s: %w",
				record.Namespace, record.Name, err)
		}
		item.Release.Data.Chart = raw
	}
	if record.Chart != nil && len(record.Chart.Values) > 0 {
		raw, err := json.Marshal(record.Chart.Values)
		if err != nil {
			return bundle.Item{}, fmt.Errorf("encode the default values of release %s/%s: %w", record.Namespace, record.Name, err)
		}
		item.Release.Data.Defaults = raw
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

// Objects returns the objects in the manifest of a record.
func (r *StoredRecord) Objects(ctx context.Context) ([]*unstructured.Unstructured, error) {
	if err := r.reserve(ctx, memoryOfManifest(r.Manifest)); err != nil {
		return nil, err
	}
	objects, err := kube.DecodeLenient([]byte(r.Manifest))
	if err != nil {
		return nil, fmt.Errorf("parse the record of release %s/%s: %w", r.Namespace, r.Name, err)
	}
	return objects, nil
}

// DecodeHooks returns the hooks of a record.
func (r *StoredRecord) DecodeHooks(ctx context.Context) ([]Hook, error) {
	if err := r.reserve(ctx, memoryOfHooks(r.Hooks)); err != nil {
		return nil, err
	}
	var hooks []Hook
	for _, h := range r.Hooks {
		objects, err := kube.DecodeLenient([]byte(h.Manifest))
		if err != nil {
			return nil, fmt.Errorf("parse hook %s in the record of release %s/%s: %w", h.Path, r.Namespace, r.Name, err)
		}
		for _, obj := range objects {
			hooks = append(hooks, ParseHook(obj, h.Path))
		}
	}
	return hooks, nil
}

// reserve reserves the memory for the record and for the result of a method.
func (r *StoredRecord) reserve(ctx context.Context, resultSize int64) error {
	if err := r.memory.Resize(ctx, r.size+resultSize); err != nil {
		return fmt.Errorf("decode the manifest of release %s/%s, revision %d: %w", r.Namespace, r.Name, r.Version, err)
	}
	return nil
}

func memoryOfManifest(text string) int64 {
	return kube.MemoryOfManifest(len(text), kube.CountValues([]byte(text)))
}

func memoryOfHooks(hooks []*helm.Hook) (size int64) {
	for _, h := range hooks {
		size += memoryOfManifest(h.Manifest)
	}
	return size
}

// memoryOfRecord returns the memory to decode the JSON of a record and to encode the record again, in bytes.
func memoryOfRecord(raw []byte) int64 {
	encoded := len(raw)
	for _, char := range []byte("<>&") {
		encoded += bytes.Count(raw, []byte{char}) * (escapedBytes - 1)
	}
	return kube.MemoryOf(raw, kube.TypeAny) + int64(encoded)*encodedByteCost
}

// decode is the reverse of encode. It reserves memory for the record. Its error wraps errInvalid unless there is not
// enough memory.
func decode(ctx context.Context, encoded []byte, memory *kube.Reservation) (*StoredRecord, error) {
	raw, err := decompress(ctx, encoded, memory)
	if err != nil {
		return nil, err
	}
	r := &StoredRecord{Release: &helm.Release{}, memory: memory, size: memoryOfRecord(raw)}
	if err := memory.Resize(ctx, r.size); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(raw, r.Release); err != nil {
		return nil, fmt.Errorf("%w: decode JSON: %w", errInvalid, err)
	}
	// Callers use the hooks without a nil check: "hooks":[null] would end the process.
	r.Hooks = slices.DeleteFunc(r.Hooks, func(h *helm.Hook) bool { return h == nil })
	return r, nil
}

// decompress returns the JSON of an encoded record. It reserves the memory for each part before it reads the part.
func decompress(ctx context.Context, encoded []byte, memory *kube.Reservation) ([]byte, error) {
	if len(encoded) > maxStoredBytes {
		return nil, fmt.Errorf("%w: it has more than %d bytes", errInvalid, maxStoredBytes)
	}
	packed, err := base64.StdEncoding.DecodeString(string(encoded))
	if err != nil {
		return nil, fmt.Errorf("%w: decode base64: %w", errInvalid, err)
	}
	reader, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("%w: decompress: %w", errInvalid, err)
	}
	var raw []byte
	for size := firstPart; ; size = min(2*size, maxDecodedBytes+1) {
		if err := memory.Resize(ctx, int64(2*size)); err != nil { // Grow needs the old and the new bytes while it copies
			return nil, err
		}
		raw = slices.Grow(raw, size-len(raw))
		n, err := io.ReadFull(reader, raw[len(raw):size])
		raw = raw[:len(raw)+n]
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return raw, nil
		case err != nil:
			return nil, fmt.Errorf("%w: decompress: %w", errInvalid, err)
		case len(raw) > maxDecodedBytes:
			return nil, fmt.Errorf("%w: it has more than %d MiB", errInvalid, maxDecodedBytes>>20)
		}
	}
}
