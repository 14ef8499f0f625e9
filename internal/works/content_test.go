package works_test

import (
	"strings"
	"testing"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/works"
)

func TestInvalidManifestIsAnItemWithAProblem(t *testing.T) {
	t.Parallel()
	w := &world{TB: t, objects: "ns"}
	for name, test := range map[string]struct{ manifest, want string }{
		"no name":             {"{apiVersion: v1, kind: ConfigMap, metadata: {namespace: a}}", "manifest 1: metadata.name is missing"},
		"no kind":             {"{apiVersion: v1, metadata: {name: a}}", "manifest 1: kind or apiVersion is missing"},
		"label is a number":   {"{apiVersion: v1, kind: ConfigMap, metadata: {name: a, labels: {a: 1}}}", "manifest 1: metadata.labels: "},
		"duplicate":           {configMap("fine", "2"), "manifest 1: ConfigMap ns/fine is a duplicate of manifest 0"},
		"it is not an object": {"[]", "manifest 1: decode: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			work := &workv1alpha1.Work{}
			work.Spec.Workload.Manifests = []workv1alpha1.Manifest{
				w.manifest(configMap("fine", "1")), w.manifest(test.manifest), w.manifest(configMap("too", "1")),
			}
			items := works.Bundle(work).Items
			if len(items) != 3 || len(items[0].Objects) != 1 || len(items[1].Objects) != 0 || len(items[2].Objects) != 1 {
				t.Fatalf("got %v", items)
			}
			if !strings.HasPrefix(items[1].DecodeError, test.want) {
				t.Errorf("got %q, want %s", items[1].DecodeError, test.want)
			}
		})
	}
}
