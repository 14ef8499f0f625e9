package inventory_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// member is the namespace of one test on the shared API server.
type member struct {
	t         *testing.T
	core      *corev1client.CoreV1Client
	objects   metadata.Interface
	namespace string
}

func newMember(t *testing.T) *member {
	t.Helper()
	plane := localkube.Shared(t)
	return &member{
		t: t, core: corev1client.NewForConfigOrDie(plane.Config), objects: metadata.NewForConfigOrDie(plane.Config),
		namespace: plane.Namespace(t, "inventory"),
	}
}

// store returns a new Store, as a process that was just started has it.
func (m *member) store(scope inventory.OwnerScope) *inventory.Store {
	return inventory.NewStore(m.core, m.objects, m.namespace, scope)
}

// secrets lists the names of the Secrets in the namespace.
func (m *member) secrets() []string {
	m.t.Helper()
	list, err := m.core.Secrets(m.namespace).List(m.t.Context(), metav1.ListOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names
}

func (m *member) deleteSecret(name string) {
	m.t.Helper()
	if err := m.core.Secrets(m.namespace).Delete(m.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		m.t.Fatal(err)
	}
}

func (m *member) load(s *inventory.Store) *inventory.Record {
	m.t.Helper()
	rec, err := s.Load(m.t.Context(), id())
	if err != nil {
		m.t.Fatal(err)
	}
	return rec
}

func (m *member) save(s *inventory.Store, prior, next *inventory.Record, content *bundle.Bundle) *inventory.Record {
	m.t.Helper()
	saved, err := s.Save(m.t.Context(), prior, next, content)
	if err != nil {
		m.t.Fatal(err)
	}
	return saved
}

func id() bundle.ID {
	return bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "eu/web", Feature: "Helm"}
}

// content returns a bundle with a ConfigMap that has some bytes that cannot be compressed.
func content(t *testing.T, size int) *bundle.Bundle {
	t.Helper()
	raw := make([]byte, size/2)
	if _, err := rand.Read(raw); err != nil {
		t.Fatal(err)
	}
	obj := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "a"}, "data": map[string]any{"a": hex.EncodeToString(raw)},
	}}
	return &bundle.Bundle{ID: id(), Items: []bundle.Item{{Objects: []*unstructured.Unstructured{obj}}}}
}

// edited returns a copy of rec with an entry and a release.
func edited(rec *inventory.Record) *inventory.Record {
	next := rec.Edit()
	ref := kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "web", Name: "a"}
	next.State = bundle.StateApplied
	next.Entries[ref.Key()] = inventory.Entry{Ref: ref, UID: "u", Fingerprint: "f"}
	next.Releases = []inventory.ReleaseState{{Namespace: "web", Name: "nginx", Revision: 1, Stage: inventory.StageDeployed, HelmSecretUID: "s"}}
	return next
}

func TestRecordIsReadByTheNextProcess(t *testing.T) {
	t.Parallel()
	m := newMember(t)
	s := m.store(inventory.OwnerScope{})
	none := m.load(s)
	if none.Exists() {
		t.Error("a record exists before one is saved")
	}
	b := content(t, 100)
	saved := m.save(s, none, edited(none), b)
	if names := m.secrets(); len(names) != 1 {
		t.Errorf("a small record is in %v", names)
	}
	next := m.store(inventory.OwnerScope{})
	rec := m.load(next)
	if diff := cmp.Diff(rec.SortedEntries(), saved.SortedEntries()); diff != "" || len(rec.Entries) != 1 {
		t.Errorf("entries (-got +want):\n%s", diff)
	}
	if diff := cmp.Diff(rec.Head, saved.Head); diff != "" {
		t.Errorf("head (-got +want):\n%s", diff)
	}
	got, err := next.Bundle(t.Context(), rec)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(got.Items, b.Items); diff != "" {
		t.Errorf("content (-got +want):\n%s", diff)
	}
	if err := next.Delete(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
	if names := m.secrets(); len(names) != 0 {
		t.Errorf("left after the deletion: %v", names)
	}
}

func TestLargeContentIsInChunksThatNothingElseKeeps(t *testing.T) {
	t.Parallel()
	m := newMember(t)
	s := m.store(inventory.OwnerScope{})
	none := m.load(s)
	first := m.save(s, none, edited(none), content(t, 3<<20))
	chunks := s.SecretNames(first)
	if len(chunks) < 3 {
		t.Fatalf("3 MiB are in %v", chunks)
	}
	// A save without content keeps the chunks, and one with other content deletes them.
	second := m.save(s, first, first.Edit(), nil)
	if diff := cmp.Diff(s.SecretNames(second), chunks); diff != "" {
		t.Errorf("Secrets (-got +want):\n%s", diff)
	}
	third := m.save(s, second, second.Edit(), content(t, 100))
	if got := m.secrets(); !cmp.Equal(got, s.SecretNames(third)) {
		t.Errorf("Secrets: got %v, want %v", got, s.SecretNames(third))
	}
}

func TestRecordWithoutAChunkIsIncomplete(t *testing.T) {
	t.Parallel()
	m := newMember(t)
	s := m.store(inventory.OwnerScope{})
	none := m.load(s)
	saved := m.save(s, none, edited(none), content(t, 2<<20))
	m.deleteSecret(s.SecretNames(saved)[0])
	if lost, err := s.IsLost(t.Context(), id()); err != nil || !lost {
		t.Errorf("IsLost: got %t, %v", lost, err)
	}
	rec := m.load(s)
	if complete, err := s.IsComplete(t.Context(), rec); err != nil || complete {
		t.Errorf("IsComplete: got %t, %v", complete, err)
	}
	if _, err := s.Bundle(t.Context(), rec); !errors.Is(err, inventory.ErrIncomplete) {
		t.Errorf("Bundle: got %v", err)
	}
	rec = rec.WithoutContent()
	repaired := m.save(s, rec, rec, content(t, 100))
	if names := m.secrets(); !cmp.Equal(names, s.SecretNames(repaired)) {
		t.Errorf("the repaired record is in %v, want only %v", names, s.SecretNames(repaired))
	}
	if complete, err := s.IsComplete(t.Context(), repaired); err != nil || !complete || len(repaired.Entries) != 1 {
		t.Errorf("repaired: got %t, %v, %v", complete, err, repaired.Entries)
	}
}

// TestIncompleteRecordIsKnown has a record whose entries another client has overwritten.
func TestIncompleteRecordIsKnown(t *testing.T) {
	t.Parallel()
	for name, data := range map[string]map[string][]byte{
		"no entries":      {"inventory": []byte("x")},
		"a long head":     {"head": []byte(`{"id":{"requestorKind":"ClusterSummary","requestorName":"eu/web","feature":"Helm"},"releases":[` + strings.Repeat(`{},`, 40_000) + `{}]}`)},
		"too many chunks": {"head": []byte(`{"id":{"requestorKind":"ClusterSummary","requestorName":"eu/web","feature":"Helm"},"inventoryChunks":[` + strings.Repeat(`"x",`, 1000) + `"x"]}`)},
		"no head":         {"head": nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMember(t)
			s := m.store(inventory.OwnerScope{})
			none := m.load(s)
			saved := m.save(s, none, edited(none), content(t, 100))
			secret, err := m.core.Secrets(m.namespace).Get(t.Context(), s.SecretNames(saved)[0], metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			maps.Copy(secret.Data, data)
			if _, err := m.core.Secrets(m.namespace).Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			next := m.store(inventory.OwnerScope{})
			if err := next.List(t.Context()); err != nil {
				t.Errorf("List: %v", err)
			}
			for range 2 {
				if cached := next.Cached(id()); cached == nil || !cached.Exists() || cached.ID != id() {
					t.Errorf("Cached: got %v", cached)
				}
				if _, err := next.Load(t.Context(), id()); !errors.Is(err, inventory.ErrIncomplete) {
					t.Errorf("Load: got %v", err)
				}
			}
			if heads, err := next.ListHeads(t.Context()); err != nil || len(heads) != 1 || heads[0].ID != id() {
				t.Errorf("ListHeads: got %v, %v", heads, err)
			}
		})
	}
}

// TestDeletedHeadLeavesNoChunks deletes a record of ListHeads that another process has written.
func TestDeletedHeadLeavesNoChunks(t *testing.T) {
	t.Parallel()
	m := newMember(t)
	s := m.store(inventory.OwnerScope{})
	none := m.load(s)
	m.save(s, none, edited(none), content(t, 2<<20))
	next := m.store(inventory.OwnerScope{})
	heads, err := next.ListHeads(t.Context())
	if err != nil || len(heads) != 1 {
		t.Fatalf("ListHeads: got %v, %v", heads, err)
	}
	if err := next.Delete(t.Context(), heads[0]); err != nil {
		t.Fatal(err)
	}
	if names := m.secrets(); len(names) != 0 {
		t.Errorf("left after the deletion: %v", names)
	}
}

func TestRecordThatAnotherProcessHasChangedIsNotOverwritten(t *testing.T) {
	t.Parallel()
	m := newMember(t)
	mine, theirs := m.store(inventory.OwnerScope{}), m.store(inventory.OwnerScope{})
	none := m.load(mine)
	prior := m.save(mine, none, edited(none), content(t, 100))
	read := m.load(theirs)
	next := read.Edit()
	next.Message = "changed"
	m.save(theirs, read, next, nil)
	if _, err := mine.Save(t.Context(), prior, prior.Edit(), nil); !apierrors.IsConflict(err) {
		t.Errorf("got %v, want a conflict", err)
	}
	heads, err := mine.ListHeads(t.Context())
	if err != nil || len(heads) != 1 || heads[0].Message != "changed" {
		t.Errorf("heads: got %v, %v", heads, err)
	}
}

func TestScopesDoNotSeeEachOther(t *testing.T) {
	t.Parallel()
	m := newMember(t)
	stores := map[string]*inventory.Store{}
	for name, scope := range map[string]inventory.OwnerScope{
		"zero": {}, "former": {Hub: "h", Registration: "1"}, "present": {Hub: "h", Registration: "2"}, "other hub": {Hub: "i", Registration: "1"},
	} {
		stores[name] = m.store(scope)
		none := m.load(stores[name])
		if none.Exists() {
			t.Errorf("%s: reads the record of another scope", name)
		}
		m.save(stores[name], none, edited(none), content(t, 100))
	}
	stores["present"].DeleteRecordsOfOlderRegistrations(t.Context())
	for name, want := range map[string]int{"zero": 1, "former": 0, "present": 1, "other hub": 1} {
		listed := m.store(stores[name].Scope())
		err := listed.List(t.Context())
		if records := listed.ListCached(); err != nil || len(records) != want || !listed.IsListed() {
			t.Errorf("%s: got %d records, %v; want %d", name, len(records), err, want)
		}
	}
}

// TestCachedRecordsHaveNoContent saves and reads a record: its content is on the member, and not in the cache.
func TestCachedRecordsHaveNoContent(t *testing.T) {
	t.Parallel()
	m := newMember(t)
	s := m.store(inventory.OwnerScope{})
	none := m.load(s)
	b := content(t, 100<<10)
	rec := m.save(s, none, edited(none), b)
	for range 2 {
		cached := s.Cached(id())
		if size := cached.InlineSize(); size != 0 || !cached.HasContent() {
			t.Errorf("the cached record has %d bytes of content, HasContent: %t", size, cached.HasContent())
		}
		if _, err := s.Save(t.Context(), cached, cached.Edit(), nil); err == nil {
			t.Error("a cached record was saved without its content")
		}
		next := rec.Edit()
		next.Message += "changed "
		rec = m.save(s, rec, next, nil)
		got, err := s.Bundle(t.Context(), rec)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(got.Items, b.Items); diff != "" {
			t.Errorf("content (-got +want):\n%s", diff)
		}
		rec = m.load(s)
	}
	if rec.Message != "changed changed " {
		t.Errorf("got message %q", rec.Message)
	}
}

// TestPagesWithoutEnd lists the records of a member that returns pages without end.
func TestPagesWithoutEnd(t *testing.T) {
	t.Parallel()
	page := &corev1.SecretList{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "SecretList"}, ListMeta: metav1.ListMeta{Continue: "next"}, Items: make([]corev1.Secret, 500),
	}
	raw, err := json.Marshal(page)
	if err != nil {
		t.Fatal(err)
	}
	var pages atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		pages.Add(1)
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(raw)
	}))
	t.Cleanup(server.Close)
	config := &rest.Config{Host: server.URL, QPS: -1}
	s := inventory.NewStore(corev1client.NewForConfigOrDie(config), metadata.NewForConfigOrDie(config), "projectsveltos", inventory.OwnerScope{})
	for name, list := range map[string]func(context.Context) error{
		"List":      s.List,
		"ListHeads": func(ctx context.Context) error { _, err := s.ListHeads(ctx); return err },
	} {
		pages.Store(0)
		if err := list(t.Context()); err == nil || err.Error() != "list records: the cluster has more than 20000" || pages.Load() != 41 {
			t.Errorf("%s: after %d pages: got error %v", name, pages.Load(), err)
		}
	}
}
