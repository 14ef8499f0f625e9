package release

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	helm "helm.sh/helm/v4/pkg/release/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

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

func isNoMemory(err error) bool { return err != nil && strings.Contains(err.Error(), "MiB of memory") }

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
			if err := s.SetStatus(t.Context(), Entry{Key: Key{"site", "web"}, Revision: 1}, "superseded", ""); !isNoMemory(err) {
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
