package engine

import (
	"context"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// watched is one kind that is watched, and where.
type watched struct {
	gk       schema.GroupKind
	resource kube.Resource
}

// watches holds one metadata-only watch, on marked objects only, for each kind that a healing bundle holds.
type watches struct {
	healer  *healer
	running map[watched]context.CancelFunc
	ended   sync.WaitGroup
}

// follow starts and stops watches until they are those that the records want. Kinds that the server does not know now are left out:
// when they are defined again, by healing too, the records change.
func (w *watches) follow(ctx context.Context, records []*inventory.Record) {
	wanted := map[watched]bool{}
	seen := map[schema.GroupVersionKind]bool{}
	for _, rec := range records {
		if !rec.Options.Heal {
			continue
		}
		for _, ref := range rec.TrackedRefs() {
			gvk := ref.GVK()
			if seen[gvk] {
				continue
			}
			seen[gvk] = true
			if resource, err := w.healer.engine.member.mapper.AnyVersion(gvk); err == nil {
				wanted[watched{gvk.GroupKind(), resource}] = true
			}
		}
	}
	for one, cancel := range w.running {
		if !wanted[one] {
			cancel()
			delete(w.running, one)
		}
	}
	for one := range wanted {
		if w.running[one] == nil {
			w.start(ctx, one)
		}
	}
}

func (w *watches) start(ctx context.Context, one watched) {
	ctx, cancel := context.WithCancel(ctx)
	w.running[one] = cancel
	api := w.healer.engine.member.objects.Resource(one.resource.GVR)
	lister := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			opts.LabelSelector = kube.LabelReason
			return api.List(ctx, opts)
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			opts.LabelSelector = kube.LabelReason
			return api.Watch(ctx, opts)
		},
	}
	reflector := cache.NewReflectorWithOptions(lister, &metav1.PartialObjectMetadata{}, &sink{healer: w.healer, gk: one.gk},
		cache.ReflectorOptions{Name: "engine " + one.gk.String()})
	w.ended.Go(func() { reflector.RunWithContext(ctx) })
}

func (w *watches) stop() {
	for _, cancel := range w.running {
		cancel()
	}
	w.ended.Wait()
}

// sink is a reflector's store that stores nothing: it passes what it sees on to the healer.
type sink struct {
	healer *healer
	gk     schema.GroupKind
}

var _ cache.ReflectorStore = (*sink)(nil)

func (s *sink) key(obj *metav1.PartialObjectMetadata) kube.Ref {
	return kube.Ref{Group: s.gk.Group, Kind: s.gk.Kind, Namespace: obj.Namespace, Name: obj.Name}
}

// Add passes an object on that is there.
func (s *sink) Add(obj any) error {
	if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
		seen := liveOf(meta)
		s.healer.see(s.key(meta), sighting{
			uid: seen.UID, state: seen.Fingerprint(), signature: seen.Signature(), ignored: seen.Deleting || seen.IgnoresDrift(),
		})
	}
	return nil
}

// Update does what Add does.
func (s *sink) Update(obj any) error { return s.Add(obj) }

// Delete passes an object on that is gone, or that has lost our label.
func (s *sink) Delete(obj any) error {
	if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
		s.healer.see(s.key(meta), sighting{gone: true, uid: meta.UID})
	}
	return nil
}

// Replace passes everything on that is there, and what the records hold and is not.
func (s *sink) Replace(objects []any, _ string) error {
	there := map[kube.Ref]bool{}
	for _, obj := range objects {
		if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
			there[s.key(meta)] = true
			if err := s.Add(meta); err != nil {
				return err
			}
		}
	}
	for _, rec := range s.healer.engine.store.ListCached() {
		if !rec.Options.Heal {
			continue
		}
		for _, ref := range rec.TrackedRefs() {
			key := ref.Key()
			if key.Group == s.gk.Group && key.Kind == s.gk.Kind && !there[key] {
				s.healer.see(key, sighting{gone: true})
			}
		}
	}
	return nil
}

// Resync does nothing: the healer has a resync of its own.
func (s *sink) Resync() error { return nil }

// records starts the watch on the records themselves.
func (w *watches) records(ctx context.Context) {
	reflector := cache.NewReflectorWithOptions(w.healer.engine.store.ListWatch(), &metav1.PartialObjectMetadata{}, &recordSink{w.healer},
		cache.ReflectorOptions{Name: "engine records"})
	w.ended.Go(func() { reflector.RunWithContext(ctx) })
}

// recordSink is a reflector's store that stores nothing: it has the healer look for records whose Secrets went.
type recordSink struct{ healer *healer }

var _ cache.ReflectorStore = (*recordSink)(nil)

// Add does nothing: what is written is written by this engine.
func (*recordSink) Add(any) error { return nil }

// Update does nothing either.
func (*recordSink) Update(any) error { return nil }

// Delete takes a Secret that is gone. Most of them the engine has deleted itself; it does not know those records any more.
func (s *recordSink) Delete(obj any) error {
	if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
		s.look(func(name string) bool { return name != meta.Name })
	}
	return nil
}

// Replace takes all Secrets of records that there are.
func (s *recordSink) Replace(objects []any, _ string) error {
	there := map[string]bool{}
	for _, obj := range objects {
		if meta, ok := obj.(*metav1.PartialObjectMetadata); ok {
			there[meta.Name] = true
		}
	}
	s.look(func(name string) bool { return there[name] })
	return nil
}

// look has the records looked at that need a Secret which is not there.
func (s *recordSink) look(there func(name string) bool) {
	for _, rec := range s.healer.engine.store.ListCached() {
		for _, name := range s.healer.engine.store.SecretNames(rec) {
			if !there(name) {
				s.healer.miss(rec.ID, settleTime)
				break
			}
		}
	}
}

// Resync does nothing.
func (*recordSink) Resync() error { return nil }
