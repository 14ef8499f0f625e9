package release

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	helm "helm.sh/helm/v4/pkg/release/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

// newLimitedStore returns a Store with the record of a revision 1 of release site/web, whose JSON has the given other
// fields.
func newLimitedStore(t *testing.T, memory *kube.ResponseMemory, fields string) Store {
	t.Helper()
	raw := fmt.Sprintf(`{"name":"web","namespace":"site","version":1,"info":{"status":"deployed"},%s}`, fields)
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "site", Name: SecretName("web", 1)},
		Data:       map[string][]byte{dataKey: storedForm(t, []byte(raw))},
	}
	return Store{Secrets: fake.NewClientset(secret).CoreV1(), Memory: memory.Reserve("eu", 0)}
}

func isNoMemory(err error) bool { return errors.Is(err, kube.ErrTooMuchMemory) }

// TestRecordsThatNeedMuchMemory reads small Secrets whose records need much memory, or are decompressed to much.
func TestRecordsThatNeedMuchMemory(t *testing.T) {
	const many = 5_000_000
	for name, fields := range map[string]string{
		"values": `"config":{"a":[` + strings.Repeat("{},", many) + `{}]}`,
		"charts": `"chart":{"values":{"a":[` + strings.Repeat("[],", many) + `[]]}}`,
		"hooks":  `"hooks":[` + strings.Repeat("{},", many) + `{}]`,
		"others": `"other":[` + strings.Repeat("0,", many) + `0]`,
		"text":   `"manifest":"` + strings.Repeat("a", 30<<20) + `"`,
	} {
		s := newLimitedStore(t, kube.NewResponseMemory(32<<20), fields)
		fuzzing.Within(t, 64<<20, func() {
			if _, ok, err := s.Get(t.Context(), Key{"site", "web"}, 1); ok || !isNoMemory(err) {
				t.Errorf("%s: got %t, error %v", name, ok, err)
			}
			if err := s.SetStatus(t.Context(), Entry{Key: Key{"site", "web"}, Revision: 1}, "superseded", ""); err != nil {
				t.Errorf("%s: set the status: got error %v", name, err)
			}
		})
	}
}

// TestManifestsThatNeedMuchMemory decodes manifests of records.
func TestManifestsThatNeedMuchMemory(t *testing.T) {
	t.Parallel()
	manifest := `apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: [` + strings.Repeat("{a},", 100_000) + `]\n`
	s := newLimitedStore(t, kube.NewResponseMemory(64<<20), `"manifest":"`+manifest+`","hooks":[{"manifest":"`+manifest+`"}]`)
	record, ok, err := s.Get(t.Context(), Key{"site", "web"}, 1)
	if err != nil || !ok {
		t.Fatalf("got %t, error %v", ok, err)
	}
	defer record.Close()
	if _, err := record.Item(t.Context(), bundle.ReleaseOptions{}); !isNoMemory(err) {
		t.Errorf("Item: got error %v", err)
	}
	if _, err := record.Objects(t.Context()); !isNoMemory(err) {
		t.Errorf("Objects: got error %v", err)
	}
	if _, err := record.DecodeHooks(t.Context()); !isNoMemory(err) {
		t.Errorf("DecodeHooks: got error %v", err)
	}
}

// TestRecordsReserveMemoryUntilTheyAreClosed reads a record for which there is memory, and invalid ones, again and
// again.
func TestRecordsReserveMemoryUntilTheyAreClosed(t *testing.T) {
	t.Parallel()
	memory := kube.NewResponseMemory(16 << 20)
	s := newLimitedStore(t, memory, `"manifest":"`+strings.Repeat("a", 800_000)+`"`)
	invalid := newLimitedStore(t, memory, `"manifest":"`+strings.Repeat("a", 800_000)+`","hooks":0`)
	soon, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	for range 5 {
		record, ok, err := s.Get(t.Context(), Key{"site", "web"}, 1)
		if err != nil || !ok {
			t.Fatalf("got %t, error %v", ok, err)
		}
		if err := memory.Reserve("eu", 0).Resize(soon, 8<<20); err == nil {
			t.Fatal("the memory of the record is not reserved")
		}
		record.Close()
		if _, ok, err := invalid.Get(t.Context(), Key{"site", "web"}, 1); ok || err != nil {
			t.Fatalf("an invalid record: got %t, error %v", ok, err)
		}
	}
	var none *StoredRecord
	none.Close()
	(&StoredRecord{Release: &helm.Release{}}).Close()
}

// TestListKeepsNoMoreThanItUses lists records with large metadata, in pages.
func TestListKeepsNoMoreThanItUses(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("a", 1<<20)
	secret := func(revision int) metav1.PartialObjectMetadata {
		secret := recordSecret(revision)
		secret.Finalizers, secret.Labels[large] = []string{large}, ""
		secret.Annotations = map[string]string{kube.AnnotationRequestor: "requestor", kube.AnnotationHub: large, "other": large}
		secret.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: large}}
		return secret
	}
	foreign := secret(3)
	foreign.UID = types.UID(large)
	store := Store{Metadata: pagesOf(t, []metav1.PartialObjectMetadata{secret(2)}, nil, []metav1.PartialObjectMetadata{foreign, secret(1)})}
	entries, err := store.List(t.Context(), Key{"site", "web"})
	if err != nil || len(entries) != 2 || entries[0].Revision != 1 || entries[1].Revision != 2 {
		t.Fatalf("got %d entries, error %v", len(entries), err)
	}
	want := recordSecret(2).ObjectMeta
	want.Annotations = map[string]string{kube.AnnotationRequestor: "requestor"}
	if got := entries[1].Secret; !equality.Semantic.DeepEqual(got, want) {
		t.Errorf("got metadata of %d bytes, want %v", got.Size(), want)
	}

	endless := make([][]metav1.PartialObjectMetadata, maxListed+1)
	if _, err := (Store{Metadata: pagesOf(t, endless...)}).List(t.Context(), Key{"site", "web"}); err == nil || !strings.HasSuffix(err.Error(), "more than 20000 release records") {
		t.Errorf("empty pages: got error %v", err)
	}
}

// TestListReturnsTheLastRevisions has more than MaxEntries records, not in the order of their revisions.
func TestListReturnsTheLastRevisions(t *testing.T) {
	t.Parallel()
	var pages [][]metav1.PartialObjectMetadata
	const count = 2*MaxEntries + 10
	for revision := count; revision > 0; revision -= 5 {
		page := make([]metav1.PartialObjectMetadata, 5)
		for i := range page {
			page[i] = recordSecret((revision+i)%count + 1)
		}
		pages = append(pages, page)
	}
	entries, err := (Store{Metadata: pagesOf(t, pages...)}).List(t.Context(), Key{"site", "web"})
	if err != nil || len(entries) != MaxEntries || entries[0].Revision != count-MaxEntries+1 || entries[MaxEntries-1].Revision != count {
		t.Fatalf("got %d entries, error %v", len(entries), err)
	}
}

func recordSecret(revision int) metav1.PartialObjectMetadata {
	return metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: "site", Name: SecretName("web", revision), UID: "uid",
		Labels: map[string]string{labelOwner: ownerHelm, labelName: "web", labelVersion: fmt.Sprint(revision), labelStatus: "deployed", kube.LabelReason: "Helm"},
	}}
}

// pagesOf returns a client of a cluster that returns these pages, to requests with a limit and the token of the last
// response.
func pagesOf(t *testing.T, pages ...[]metav1.PartialObjectMetadata) metadata.Interface {
	t.Helper()
	next := ""
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if query := r.URL.Query(); query.Get("limit") == "" || query.Get("continue") != next || len(pages) == 0 {
			t.Errorf("got request %s for %d pages", r.URL, len(pages))
		}
		list := metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{Kind: "PartialObjectMetadataList", APIVersion: "meta.k8s.io/v1"}, Items: pages[0]}
		if pages = pages[1:]; len(pages) > 0 {
			next = fmt.Sprint(len(pages))
			list.Continue = next
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list)
	}))
	t.Cleanup(server.Close)
	return metadata.NewForConfigOrDie(&rest.Config{Host: server.URL, QPS: -1})
}
