package engine_test

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
)

// definitionOf returns a CustomResourceDefinition of a kind in the API group of the test.
func (c *cluster) definitionOf(kind string, shortNames ...any) *unstructured.Unstructured {
	group, plural := c.ns+".example.com", strings.ToLower(kind)+"s"
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": plural + "." + group},
		"spec": map[string]any{
			"group": group, "scope": "Namespaced", "names": map[string]any{"kind": kind, "plural": plural, "shortNames": shortNames},
			"versions": []any{
				map[string]any{"name": "v1", "served": true, "storage": true, "schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}}},
				map[string]any{"name": "v0", "served": false, "storage": false, "schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}}},
			},
		},
	}}
}

// objectOf returns an object of a kind of definitionOf.
func (c *cluster) objectOf(kind string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": c.ns + ".example.com/v1", "kind": kind, "metadata": map[string]any{"name": "one", "namespace": c.ns},
	}}
}

func TestDefinitionsAreAwaitedWithoutReadingThem(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	meter := &meter{}
	var objects []*unstructured.Unstructured
	for i := range 10 {
		kind := fmt.Sprintf("Kind%d", i)
		objects = append(objects, c.definitionOf(kind), c.objectOf(kind))
	}
	wantChanges(t, converge(t, c.engine(meter), c.bundle("kinds", objects...)).Changes, counts{bundle.Created: len(objects)})
	var reads []string
	for _, line := range meter.take() {
		if strings.HasPrefix(line, "GET") && strings.Contains(line, "customresourcedefinitions/") {
			reads = append(reads, line)
		}
	}
	// If the API server is slow, the engine may read a definition for the reason that it is not served yet.
	if len(reads) > len(objects) {
		t.Errorf("got %d reads of definitions:\n%s", len(reads), strings.Join(reads, "\n"))
	}
}

func TestRefusedDefinitionIsReportedAndNoHookRuns(t *testing.T) {
	t.Parallel()
	for _, event := range []string{"pre-install", "post-install"} {
		t.Run(event, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			converge(t, c.engine(nil), c.bundle("first", c.definitionOf("First", "taken")))

			b := c.chart(bundle.ReleaseOptions{}, c.definitionOf("Second", "taken"), asHook(c.configMap("hook", "1"), event, 0, ""))
			for range 3 {
				report := wantConvergeError(t, c.engine(nil), b)
				if !strings.Contains(report.Message, "taken") || report.Changes.Count(bundle.Failed) != 1 {
					t.Errorf("got %q and changes %v, want the reason of the API server", report.Message, report.Changes)
				}
			}
			c.wantAllNames(configMaps)
		})
	}
}

func TestRefusedDefinitionFailsAnAtomicRelease(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	converge(t, e, c.bundle("first", c.definitionOf("First", "taken")))

	options := bundle.ReleaseOptions{Atomic: true, MaxHistory: 10}
	deploy(t, e, c.chart(options, c.configMap("main", "1")))
	report := convergeUntilDone(t, e, c.chart(options, c.configMap("main", "2"), c.definitionOf("Second", "taken")))
	if !strings.Contains(report.Message, "taken") || !strings.Contains(report.Message, "rolled back to revision 1") {
		t.Errorf("got %s %q, want a rollback", report.State, report.Message)
	}
	c.wantHistory("1 superseded", "2 failed", "3 deployed")
}
