package inventory

import (
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

func newCachingStore() *Store {
	return NewStore(fake.NewClientset().CoreV1(), metadatafake.NewSimpleMetadataClient(runtime.NewScheme()), "records", OwnerScope{})
}

func objectRef(kind, name string) kube.Ref {
	return kube.Ref{Version: "v1", Kind: kind, Namespace: "default", Name: name}
}

// version returns a record in a version, with drift correction and these objects.
func version(name, version string, refs ...kube.Ref) *Record {
	rec := &Record{Head: Head{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: name, Feature: "Resources"}}, version: version, Entries: map[kube.Ref]Entry{}}
	rec.Options.CorrectDrift = true
	for _, ref := range refs {
		rec.Entries[ref.Key()] = Entry{Ref: ref}
	}
	return rec
}

func TestIndexesFollowTheRecords(t *testing.T) {
	t.Parallel()
	s := newCachingStore()
	a, b, secret := objectRef("ConfigMap", "a"), objectRef("ConfigMap", "b"), objectRef("Secret", "c")
	want := func(step string, owners map[kube.Ref][]string, kinds ...string) {
		t.Helper()
		for ref, names := range owners {
			found := map[string]bool{}
			for _, rec := range s.RecordsTracking(ref.Key()) {
				found[rec.ID.RequestorName] = true
			}
			for _, name := range names {
				if !found[name] {
					t.Errorf("%s: %s: %s is not found", step, ref, name)
				}
			}
			if len(found) != len(names) {
				t.Errorf("%s: %s: got %v, want %v", step, ref, found, names)
			}
		}
		watched := map[schema.GroupVersionKind]bool{}
		for _, kind := range s.WatchedKinds() {
			watched[kind] = true
		}
		for _, kind := range kinds {
			if !watched[schema.GroupVersionKind{Version: "v1", Kind: kind}] {
				t.Errorf("%s: %s is not watched", step, kind)
			}
		}
		if len(watched) != len(kinds) {
			t.Errorf("%s: watched: got %v, want %v", step, watched, kinds)
		}
	}
	s.setCached(version("one", "1", a, secret), false)
	s.setCached(version("two", "1", a, b), false) // both have deployed a: one of them has a conflict
	s.setCached(version("three", "1", a), false)
	want("saved", map[kube.Ref][]string{a: {"one", "two", "three"}, b: {"two"}, secret: {"one"}}, "ConfigMap", "Secret")
	s.setCached(version("one", "2", b), false)
	s.setCached(version("two", "2", b, a), false)
	want("changed", map[kube.Ref][]string{a: {"two", "three"}, b: {"one", "two"}, secret: nil}, "ConfigMap")
	s.deleteCached(version("two", "").ID)
	want("deleted", map[kube.Ref][]string{a: {"three"}, b: {"one"}}, "ConfigMap")
	noCorrection := version("one", "3", secret)
	noCorrection.Options.CorrectDrift = false
	s.setCached(noCorrection, false)
	want("without drift correction", map[kube.Ref][]string{a: {"three"}, b: nil, secret: {"one"}}, "ConfigMap")
	removed := version("one", "4", secret)
	removed.Options.CorrectDrift, removed.State = false, bundle.StateRemoving
	s.setCached(removed, false)
	want("being removed", map[kube.Ref][]string{a: {"three"}, b: nil, secret: {"one"}}, "ConfigMap", "Secret")
	s.deleteCached(version("one", "").ID)
	s.deleteCached(version("three", "").ID)
	want("all deleted", map[kube.Ref][]string{a: nil, b: nil, secret: nil})
	for name, size := range map[string]int{
		"objects": len(s.cache.byObject.first) + len(s.cache.byObject.more), "names": len(s.cache.byName.first), "records": len(s.cache.byID),
	} {
		if size != 0 {
			t.Errorf("%d %s remain in the indexes", size, name)
		}
	}
}

func TestRecordIsFoundByItsSecrets(t *testing.T) {
	t.Parallel()
	s := newCachingStore()
	rec := version("one", "1")
	head := s.headName(rec.ID)
	rec.content.chunks = []string{head + "-chunk"}
	s.setCached(rec, false)
	s.setCached(version("two", "1"), false)
	for name, want := range map[string]bool{head: true, head + "-chunk": true, head + "-former": false, "other": false} {
		if got := s.FindBySecret(name); (got == rec) != want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

// TestListDoesNotReplaceNewerRecords adds what a list has read to the cache, after a run has saved or deleted it.
func TestListDoesNotReplaceNewerRecords(t *testing.T) {
	t.Parallel()
	s := newCachingStore()
	unlock, err := s.lockListing(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	saved, deleted := version("saved", "10"), version("deleted", "8")
	s.setCached(saved, false)
	s.setCached(deleted, false)
	s.deleteCached(deleted.ID)
	s.addListed(version("saved", "9"))
	s.addListed(deleted)
	if got := s.Cached(saved.ID); got != saved {
		t.Errorf("got version %s of the saved record", got.version)
	}
	if s.Cached(deleted.ID) != nil {
		t.Error("a deleted record is cached again")
	}
	s.addListed(version("saved", "11"))
	if got := s.Cached(saved.ID); got.version != "11" {
		t.Errorf("got version %s, want the newer one of another process", got.version)
	}
	unlock()
	s.addListed(deleted)
	if s.Cached(deleted.ID) == nil {
		t.Error("a record that was created again is not cached")
	}
}
