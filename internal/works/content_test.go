package works_test

import (
	"strings"
	"testing"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/works"
)

func TestManifestThatCannotBeMeant(t *testing.T) {
	t.Parallel()
	w := &world{TB: t, objects: "ns"}
	for name, test := range map[string]struct{ manifest, want string }{
		"no name":             {"{apiVersion: v1, kind: ConfigMap, metadata: {namespace: a}}", "manifest 1: it has no name"},
		"no kind":             {"{apiVersion: v1, metadata: {name: a}}", "manifest 1: it has no kind or no apiVersion"},
		"label is a number":   {"{apiVersion: v1, kind: ConfigMap, metadata: {name: a, labels: {a: 1}}}", "manifest 1: metadata.labels: "},
		"it is not an object": {"[]", "manifest 1: decode it: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			work := &workv1alpha1.Work{}
			work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(configMap("fine", "1")), w.manifest(test.manifest)}
			if _, err := works.Bundle(work); err == nil || !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
}
