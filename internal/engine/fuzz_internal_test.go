package engine

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzDriftExclusion reads exclusions of profiles. An accepted path is a field that does not identify the object.
func FuzzDriftExclusion(f *testing.F) {
	f.Add("/spec/replicas", "Deploy.*", "a", "app in (a, b)")
	f.Add("/metadata/labels/a~1b", "", "", "")
	f.Add("/metadata", "(", "", "a in (")
	f.Add("/kind/", "(a{1000}){1000}", "x", "!a")
	f.Add("/metadata//name", "", "", "")
	f.Add("/~0/~01", "(?i)x", "", "a=b,c")
	f.Fuzz(func(t *testing.T, path, kind, name, selector string) {
		target := &libv1beta1.PatchSelector{Kind: kind, Name: name, LabelSelector: selector}
		object := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": name, "labels": map[string]any{"app": "a"}}}}
		var all []exclusion
		var err error
		fuzzing.Within(t, 64<<20, func() {
			if all, err = parseExclusions([]libv1beta1.DriftExclusion{{Paths: []string{path}, Target: target}}); err == nil {
				excludedPaths(all, kube.RefOf(object), object.Object)
			}
		})
		fuzzing.OneLine(t, err)
		if err != nil {
			return
		}
		var escaped []string
		for _, token := range all[0].paths[0] {
			escaped = append(escaped, strings.NewReplacer("~", "~0", "/", "~1").Replace(token))
		}
		again, err := parsePointer("/" + strings.Join(escaped, "/"))
		if err != nil || strings.Join(again, "\x00") != strings.Join(all[0].paths[0], "\x00") {
			t.Errorf("%q became %q, and that %q, %v", path, all[0].paths[0], again, err)
		}
	})
}
