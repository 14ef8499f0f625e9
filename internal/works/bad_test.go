package works_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
)

func TestBadManifestKeepsNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	manifests := func(texts ...string) func(*workv1alpha1.Work) {
		return func(work *workv1alpha1.Work) {
			work.Spec.Workload.Manifests = nil
			for _, text := range texts {
				work.Spec.Workload.Manifests = append(work.Spec.Workload.Manifests, w.manifest(text))
			}
		}
	}
	w.work("one", configMap("a", "1"), configMap("b", "1"))
	w.must(w.execute("one", there))
	const waits = "; 1 object is deleted after that"
	for name, test := range map[string]struct{ manifest, problem string }{
		"without a name": {
			"{apiVersion: v1, kind: ConfigMap, metadata: {generateName: b-, namespace: OBJECTS}}", "manifest 0: it has no name",
		},
		"of a Secret that makes no sense": {
			"{apiVersion: v1, kind: Secret, metadata: {name: s, namespace: OBJECTS}, stringData: {port: 8080}}",
			fmt.Sprintf("Secret %s/s: stringData.port is not a string", w.objects),
		},
		"there twice": {
			"{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: OBJECTS, namespace: other}}",
			fmt.Sprintf("ClusterRole rbac.authorization.k8s.io %[1]s is listed twice: in the bundle and in the bundle", w.objects),
		},
	} {
		// One after the other: it is the same Work.
		w.change("one", manifests(test.manifest, configMap("a", name), "{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: OBJECTS}}"))
		if err := w.execute("one", there); err == nil {
			t.Errorf("%s: no error", name)
		}
		w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", "Failed to apply all manifests (2/3): "+test.problem+waits)
		if w.value("a") != name || w.value("b") != "1" {
			t.Errorf("%s: got a=%q b=%q", name, w.value("a"), w.value("b"))
		}
	}
	w.change("one", manifests(configMap("a", "3")))
	w.must(w.execute("one", there))
	if w.value("a") != "3" || w.value("b") != "" {
		t.Errorf("after all is well: got a=%q b=%q", w.value("a"), w.value("b"))
	}
}

func TestWhatTheServerRefusesKeepsNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.work("one", configMap("a", "1"), configMap("b", "1"), configMap("c", "1"))
	w.must(w.execute("one", there))
	elsewhere := "{apiVersion: v1, kind: ConfigMap, metadata: {name: d, namespace: OBJECTS-new}}"
	w.change("one", func(work *workv1alpha1.Work) {
		work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("a", "2")), w.manifest(configMap("b", "2")), w.manifest(elsewhere)}
	})
	executor := w.executor()
	executor.Engine = w.breaking(func(r *http.Request) bool {
		return strings.HasSuffix(r.URL.Path, "/configmaps/a") || (r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/namespaces"))
	})
	if _, err := executor.Execute(t.Context(), w.get("one"), there); err == nil {
		t.Error("no error")
	}
	if w.value("a") != "1" || w.value("b") != "2" || w.value("c") != "1" {
		t.Errorf("got a=%q b=%q c=%q", w.value("a"), w.value("b"), w.value("c"))
	}
	w.must(w.execute("one", there))
	if w.value("a") != "2" || w.value("c") != "" {
		t.Errorf("after it is shown again: got a=%q c=%q", w.value("a"), w.value("c"))
	}
	w.must(w.Delete(t.Context(), w.get("one")))
	w.must(w.execute("one", there))
	if !w.gone("one") || w.value("a") != "" || w.value("b") != "" {
		t.Errorf("left: a=%q b=%q", w.value("a"), w.value("b"))
	}
}
