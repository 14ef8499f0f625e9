package works_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
)

func TestInvalidManifestDoesNotBlockOthers(t *testing.T) {
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
	w.createWork("one", configMap("a", "1"), configMap("b", "1"))
	w.noError(w.execute("one", reachable))
	const waits = "; 1 object is deleted after that"
	for name, test := range map[string]struct{ manifest, problem string }{
		"without a name": {
			"{apiVersion: v1, kind: ConfigMap, metadata: {generateName: b-, namespace: OBJECTS}}", "manifest 0: metadata.name is missing",
		},
		"invalid Secret": {
			"{apiVersion: v1, kind: Secret, metadata: {name: s, namespace: OBJECTS}, stringData: {port: 8080}}",
			fmt.Sprintf("Secret %s/s: stringData.port is not a string", w.objects),
		},
		"duplicate": {
			"{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: OBJECTS, namespace: other}}",
			fmt.Sprintf("ClusterRole rbac.authorization.k8s.io %[1]s is listed twice: in the bundle and in the bundle", w.objects),
		},
	} {
		// Sequential, because all cases change the same Work.
		w.updateWork("one", manifests(test.manifest, configMap("a", name), "{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: OBJECTS}}"))
		if err := w.execute("one", reachable); err == nil {
			t.Errorf("%s: no error", name)
		}
		w.wantCondition("one", "Applied", metav1.ConditionFalse, "AppliedFailed", "Failed to apply all manifests (2/3): "+test.problem+waits)
		if w.value("a") != name || w.value("b") != "1" {
			t.Errorf("%s: got a=%q b=%q", name, w.value("a"), w.value("b"))
		}
	}
	w.updateWork("one", manifests(configMap("a", "3")))
	w.noError(w.execute("one", reachable))
	if w.value("a") != "3" || w.value("b") != "" {
		t.Errorf("after the manifest is valid again:  got a=%q b=%q", w.value("a"), w.value("b"))
	}
}

func TestRefusedObjectDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.createWork("one", configMap("a", "1"), configMap("b", "1"), configMap("c", "1"))
	w.noError(w.execute("one", reachable))
	elsewhere := "{apiVersion: v1, kind: ConfigMap, metadata: {name: d, namespace: OBJECTS-new}}"
	w.updateWork("one", func(work *workv1alpha1.Work) {
		work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("a", "2")), w.manifest(configMap("b", "2")), w.manifest(elsewhere)}
	})
	executor := w.executor()
	executor.Engine = w.engineWithErrors(func(r *http.Request) bool {
		return strings.HasSuffix(r.URL.Path, "/configmaps/a") || (r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/namespaces"))
	})
	if err := executor.Execute(t.Context(), w.getWork("one"), reachable); err == nil {
		t.Error("no error")
	}
	if w.value("a") != "1" || w.value("b") != "2" || w.value("c") != "1" {
		t.Errorf("got a=%q b=%q c=%q", w.value("a"), w.value("b"), w.value("c"))
	}
	w.noError(w.execute("one", reachable))
	if w.value("a") != "2" || w.value("c") != "" {
		t.Errorf("after the errors end:  got a=%q c=%q", w.value("a"), w.value("c"))
	}
	w.noError(w.Delete(t.Context(), w.getWork("one")))
	w.noError(w.execute("one", reachable))
	if !w.isDeleted("one") || w.value("a") != "" || w.value("b") != "" {
		t.Errorf("left: a=%q b=%q", w.value("a"), w.value("b"))
	}
}
