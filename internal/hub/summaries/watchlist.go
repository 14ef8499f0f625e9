package summaries

import (
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/source"
)

// watchlist remembers which objects of the hub each summary is made from. Names may be templates, so that a summary's
// spec alone does not tell. After a restart it fills as every summary is looked at once.
type watchlist struct {
	// mu guards both maps.
	mu sync.Mutex
	// readers lists the summaries that read an object; objects lists what a summary reads.
	readers map[source.Reference]map[types.NamespacedName]struct{}
	objects map[types.NamespacedName][]source.Reference
}

func newWatchlist() *watchlist {
	return &watchlist{
		readers: map[source.Reference]map[types.NamespacedName]struct{}{},
		objects: map[types.NamespacedName][]source.Reference{},
	}
}

// set replaces what summary reads. It must be called before the objects are read, or a change in between goes unseen.
func (w *watchlist) set(summary types.NamespacedName, objects []source.Reference) {
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

// of lists the summaries that read object.
func (w *watchlist) of(object source.Reference) []types.NamespacedName {
	w.mu.Lock()
	defer w.mu.Unlock()
	summaries := make([]types.NamespacedName, 0, len(w.readers[object]))
	for summary := range w.readers[object] {
		summaries = append(summaries, summary)
	}
	return summaries
}
