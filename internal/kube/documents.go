package kube

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Documents caches the JSON of a list of objects and its digest, so that all bundles with the same list encode it once.
// The list and its objects must not be changed. It is safe for concurrent use.
type Documents struct {
	objects []*unstructured.Unstructured
	encode  func() ([][]byte, error)
	digest  func() ([sha256.Size]byte, error)
	size    func() documentsSize
}

// documentsSize is the number of values in the objects of Documents, and the memory for the objects and their JSON, in
// bytes.
type documentsSize struct {
	values int
	memory int64
}

// NewDocuments returns the Documents of objects, which are encoded at the first use.
func NewDocuments(objects []*unstructured.Unstructured) *Documents {
	encode := sync.OnceValues(func() ([][]byte, error) { return encodeObjects(objects) })
	digest := sync.OnceValues(func() ([sha256.Size]byte, error) {
		docs, err := encode()
		return digestOf(docs), err
	})
	return &Documents{objects: objects, encode: encode, digest: digest, size: sync.OnceValue(func() documentsSize { return sizeOf(objects) })}
}

// CountValues returns the number of values in the objects. It is 0 if d is nil.
func (d *Documents) CountValues() int {
	if d == nil {
		return 0
	}
	return d.size().values
}

// Memory returns the memory for the objects and their JSON, in bytes. It is 0 if d is nil.
func (d *Documents) Memory() int64 {
	if d == nil {
		return 0
	}
	return d.size().memory
}

func sizeOf(objects []*unstructured.Unstructured) (size documentsSize) {
	for _, obj := range objects {
		if obj != nil {
			size.memory += pointerMemory
			size.add(obj.Object)
		}
	}
	return size
}

// isFor returns whether d caches this list: the same slice, not an equal one.
func (d *Documents) isFor(objects []*unstructured.Unstructured) bool {
	return d != nil && len(objects) > 0 && len(d.objects) == len(objects) && &d.objects[0] == &objects[0]
}

// Encode returns the canonical JSON of each object in objects, from the cache if d caches this list. The result must
// not be changed. d may be nil. Encode fails for objects without a JSON form.
func (d *Documents) Encode(objects []*unstructured.Unstructured) ([][]byte, error) {
	if d.isFor(objects) {
		return d.encode()
	}
	return encodeObjects(objects)
}

// Digest returns a digest of the result of Encode, from the cache if d caches this list. d may be nil.
func (d *Documents) Digest(objects []*unstructured.Unstructured) ([sha256.Size]byte, error) {
	if d.isFor(objects) {
		return d.digest()
	}
	docs, err := encodeObjects(objects)
	return digestOf(docs), err
}

func digestOf(docs [][]byte) [sha256.Size]byte {
	hash := sha256.New()
	for _, doc := range docs {
		_, _ = hash.Write(doc) // a hash returns no error
		_, _ = hash.Write([]byte("\n"))
	}
	return [sha256.Size]byte(hash.Sum(nil))
}

func encodeObjects(objects []*unstructured.Unstructured) ([][]byte, error) {
	docs := make([][]byte, 0, len(objects))
	for _, obj := range objects {
		if obj == nil {
			docs = append(docs, []byte("null"))
			continue
		}
		// encoding/json sorts the keys of maps, so the bytes are canonical.
		raw, err := json.Marshal(obj.Object)
		if err != nil {
			return nil, fmt.Errorf("encode %s %s/%s: %w", obj.GetKind(), obj.GetNamespace(), obj.GetName(), err)
		}
		docs = append(docs, raw)
	}
	return docs, nil
}
