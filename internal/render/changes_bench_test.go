package render_test

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
)

// BenchmarkPatch applies one patch to 1,000 Deployments in the sandbox.
func BenchmarkPatch(b *testing.B) {
	var objects []*unstructured.Unstructured
	for i := range 1000 {
		parsed, err := kube.DecodeManifest([]byte(toPatch))
		if err != nil {
			b.Fatal(err)
		}
		parsed[0].SetName(fmt.Sprintf("web-%d", i))
		objects = append(objects, parsed[0])
	}
	documents := kube.NewDocuments(objects)
	for name, text := range map[string]string{
		"operations": "- {op: replace, path: /spec/replicas, value: 3}",
		"merge":      "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: any}\nspec: {template: {spec: {containers: [{name: web, image: web:2}]}}}",
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				changes := render.Changes{Patches: []render.Patch{{Text: text, Target: target("Deployment", "")}}}
				if _, err := render.NewChanger(pool).Change(objects, documents, changes, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
