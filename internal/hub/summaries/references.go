package summaries

import (
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/source"
)

// referenceIndex has the objects on the hub to which each summary refers. References can be templates, so each
// reconcile sets the references of its summary. After a restart the index lacks a summary until its first reconcile.
type referenceIndex struct {
	// mu guards both maps.
	mu sync.Mutex
	// summaries has the summaries that refer to an object, and objects the references of a summary.
	summaries map[source.Reference]map[types.NamespacedName]struct{}
	objects   map[types.NamespacedName][]source.Reference
}

func newReferenceIndex() *referenceIndex {
	return &referenceIndex{
		summaries: map[source.Reference]map[types.NamespacedName]struct{}{},
		objects:   map[types.NamespacedName][]source.Reference{},
	}
}

// set replaces the references of summary. It must be called before the objects are read, so that no change is missed.
func (w *referenceIndex) set(summary types.NamespacedName, objects []source.Reference) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, object := range w.objects[summary] {
		delete(w.summaries[object], summary)
		if len(w.summaries[object]) == 0 {
			delete(w.summaries, object)
		}
	}
	delete(w.objects, summary)
	if len(objects) == 0 {
		return
	}
	w.objects[summary] = slices.Clone(objects)
	for _, object := range objects {
		if w.summaries[object] == nil {
			w.summaries[object] = map[types.NamespacedName]struct{}{}
		}
		w.summaries[object][summary] = struct{}{}
	}
}

func (w *referenceIndex) summariesFor(object source.Reference) []types.NamespacedName {
	w.mu.Lock()
	defer w.mu.Unlock()
	summaries := make([]types.NamespacedName, 0, len(w.summaries[object]))
	for summary := range w.summaries[object] {
		summaries = append(summaries, summary)
	}
	return summaries
}

// hasReferences returns whether summary refers to objects. It returns false before the first reconcile of the summary.
func (w *referenceIndex) hasReferences(summary types.NamespacedName) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.objects[summary]) > 0
}

// hasKind returns whether a summary refers to an object of a kind.
func (w *referenceIndex) hasKind(kind string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for object := range w.summaries {
		if object.Kind == kind {
			return true
		}
	}
	return false
}
