package kube

import (
	"encoding/json"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Documents caches the JSON of a list of objects, so that all bundles with the same list encode it once.
// The list and its objects must not be changed. It is safe for concurrent use.
type Documents struct {
	objects []*unstructured.Unstructured
	encode  func() ([][]byte, error)
}

// NewDocuments returns the Documents of objects, which are encoded at the first use.
func NewDocuments(objects []*unstructured.Unstructured) *Documents {
	return &Documents{objects: objects, encode: sync.OnceValues(func() ([][]byte, error) { return encodeObjects(objects) })}
}

// isOf returns whether d caches this list.
func (d *Documents) isOf(objects []*unstructured.Unstructured) bool {
	return d != nil && len(objects) > 0 && len(d.objects) == len(objects) && &d.objects[0] == &objects[0]
}

// Encode returns the canonical JSON of each object in objects, from the cache if d is of this list. It must not be
// changed. d may be nil. It fails for objects without a JSON form.
func (d *Documents) Encode(objects []*unstructured.Unstructured) ([][]byte, error) {
	if d.isOf(objects) {
		return d.encode()
	}
	return encodeObjects(objects)
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
