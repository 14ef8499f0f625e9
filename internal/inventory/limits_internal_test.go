package inventory

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// createRecord creates a record with JSON of entries, as others can write it.
func createRecord(t *testing.T, s *Store, name, entries string) bundle.ID {
	t.Helper()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: name, Feature: "Resources"}
	head, err := json.Marshal(Head{ID: id})
	if err != nil {
		t.Fatal(err)
	}
	packed, err := s.entryCompressor.pack(json.RawMessage(entries))
	if err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Name: s.headName(id), ResourceVersion: "1", Labels: s.labels(partHead), Annotations: map[string]string{kube.AnnotationRequestor: id.String()},
		},
		Data: map[string][]byte{keyHead: head, keyEntries: packed},
	}
	if _, err := s.secrets.Create(t.Context(), secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return id
}

// TestMemoryOfRecordsIsLimited has three records with small entries, of which two may be in memory.
func TestMemoryOfRecordsIsLimited(t *testing.T) {
	t.Parallel()
	var entries strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&entries, `,{"ref":{"kind":"a","name":"%d"}}`, i)
	}
	s := newCachingStore()
	// A record needs 12 MB, and 18 MB while it is decoded. A cluster can have half of the total.
	memory := kube.NewResponseMemory(96<<20).Reserve("eu", 0)
	s.LimitMemory(memory)
	var ids []bundle.ID
	for _, name := range []string{"first", "second", "third"} {
		ids = append(ids, createRecord(t, s, name, "["+entries.String()[1:]+"]"))
	}
	isNoMemory := func(err error) bool {
		return err != nil && strings.Contains(err.Error(), "memory") && !errors.Is(err, ErrIncomplete)
	}
	if err := s.List(t.Context()); !isNoMemory(err) {
		t.Errorf("List: got error %v", err)
	}
	cached := s.ListCached()
	if len(cached) != 2 || len(cached[0].Entries) != 10_000 {
		t.Fatalf("%d records are in memory", len(cached))
	}
	for _, id := range ids {
		isCached := s.Cached(id) != nil
		if _, err := s.Load(t.Context(), id); isCached != (err == nil) || err != nil && !isNoMemory(err) {
			t.Errorf("Load of a record that is in memory: %t: got error %v", isCached, err)
		}
	}
	s.deleteCached(cached[0].ID)
	s.deleteCached(cached[1].ID)
	another := memory.ForSameNamespace()
	if err := another.Resize(t.Context(), 47<<20); err != nil {
		t.Errorf("the memory of deleted records is still reserved: %v", err)
	}
	another.Close()
	for _, id := range ids[:2] {
		if _, err := s.Load(t.Context(), id); err != nil {
			t.Errorf("Load after others were deleted: got error %v", err)
		}
	}
}

// TestMemoryOfContentIsLimited has a record whose content needs much memory when it is decoded.
func TestMemoryOfContentIsLimited(t *testing.T) {
	t.Parallel()
	s := newCachingStore()
	packed, err := s.contentCompressor.pack(json.RawMessage(`{"items":[` + strings.Repeat("{},", 99_999) + `{}]}`))
	if err != nil {
		t.Fatal(err)
	}
	rec := &Record{content: storedValue{inline: packed}}
	for _, test := range []struct {
		total   int64
		wantErr bool
	}{{400 << 20, false}, {60 << 20, true}} {
		s.LimitMemory(kube.NewResponseMemory(test.total).Reserve("eu", 0))
		if _, err := s.Bundle(t.Context(), rec); (err != nil) != test.wantErr || errors.Is(err, ErrIncomplete) {
			t.Errorf("%d MiB: got error %v", test.total>>20, err)
		}
	}
}

// TestLongChunkIsRefused has a chunk of a length that no Store writes.
func TestLongChunkIsRefused(t *testing.T) {
	t.Parallel()
	s := newCachingStore()
	for name, size := range map[string]int{"valid": chunkSize, "long": chunkSize + 1} {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{keyChunk: make([]byte, size)}}
		if _, err := s.secrets.Create(t.Context(), secret, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.readValue(t.Context(), storedValue{chunks: []string{name}}, maxContent); (size > chunkSize) != errors.Is(err, ErrIncomplete) {
			t.Errorf("%d bytes: got error %v", size, err)
		}
	}
}

// TestLongTextsAreNotKept has an ID and a resourceVersion that no API server stores.
func TestLongTextsAreNotKept(t *testing.T) {
	t.Parallel()
	s := newCachingStore()
	long := strings.Repeat("a", 1<<20)
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: long, Feature: "Resources"}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
		Name: s.headName(id), ResourceVersion: long, Annotations: map[string]string{kube.AnnotationRequestor: id.String()},
	}}
	if _, ok := s.idOf(secret); ok {
		t.Error("the ID is read")
	}
	if version := versionOf(secret); len(version) > maxIdentifier {
		t.Errorf("the resourceVersion has %d bytes", len(version))
	}
}
