package works_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/towline/towline/internal/works"
)

// TestChangeOfOneObjectReadsOneObject executes a Work again after one of its many objects has changed.
func TestChangeOfOneObjectReadsOneObject(t *testing.T) {
	t.Parallel()
	const manifests = 40
	w := newWorld(t)
	var texts []string
	for i := range manifests {
		texts = append(texts, configMap(fmt.Sprintf("m-%02d", i), "1"))
	}
	w.createWork("one", texts...)
	var mu sync.Mutex // guards requests
	var requests []string
	executor := w.executor()
	executor.Engine = w.engineWithErrors(func(r *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(r.URL.Path, "/namespaces/"+w.objects+"/") {
			requests = append(requests, r.Method+" "+r.URL.RequestURI())
		}
		return false
	})
	execute := func() {
		t.Helper()
		if err := executor.Execute(t.Context(), w.getWork("one"), works.ClusterState{Reachable: true}); err != nil {
			t.Fatal(err)
		}
	}
	execute()
	requests = nil
	w.setValue("m-07", "2")
	execute()
	// One list and one apply request to converge, one list and one object to observe.
	if len(requests) > 4 || w.value("m-07") != "1" {
		t.Errorf("m-07 is %q, requests:\n%s", w.value("m-07"), strings.Join(requests, "\n"))
	}
	for _, status := range w.getWork("one").Status.ManifestStatuses {
		if status.Health != "Healthy" {
			t.Errorf("manifest %d: got health %s", status.Identifier.Ordinal, status.Health)
		}
	}
}
