package summaries

import (
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/source"
)

// referenceIndex has the hub's objects that each summary refers to. References may be templates, so they are known only
// after a reconcile. After a restart the first reconcile of each summary fills it.
type referenceIndex struct {
	// mu guards both maps.
	mu sync.Mutex
	// readers has the summaries that refer to an object, objects the references of a summary.
	readers map[source.Reference]map[types.NamespacedName]struct{}
	objects map[types.NamespacedName][]source.Reference
}

func newReferenceIndex() *referenceIndex {
	return &referenceIndex{
		readers: map[source.Reference]map[types.NamespacedName]struct{}{},
		objects: map[types.NamespacedName][]source.Reference{},
	}
}

// set replaces the references of summary. Call it before reading the objects, so that no change in between is missed.
func (w *referenceIndex) set(summary types.NamespacedName, objects []source.Reference) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, object := range w.objects[summary] {
		delete(w.readers[object], summary)
		if len(w.readers[object]) == 0 {
			delete(w.readers, object)
		}
	}
	delete(w.objects, summary)
	if len(objects) == 0 {
		return
	}
	w.objects[summary] = slices.Clone(objects)
	for _, object := range objects {
		if w.readers[object] == nil {
			w.readers[object] = map[types.NamespacedName]struct{}{}
		}
		w.readers[object][summary] = struct{}{}
	}
}

// of returns the summaries that refer to object.
func (w *referenceIndex) of(object source.Reference) []types.NamespacedName {
	w.mu.Lock()
	defer w.mu.Unlock()
	summaries := make([]types.NamespacedName, 0, len(w.readers[object]))
	for summary := range w.readers[object] {
		summaries = append(summaries, summary)
	}
	return summaries
}
