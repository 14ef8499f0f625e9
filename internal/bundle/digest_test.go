package bundle_test

import (
	"crypto/sha256"
	"encoding/json"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// plainDigest is the definition of the digest: the hash of the JSON without the default values of charts.
func plainDigest(t *testing.T, b bundle.Bundle) bundle.Digest {
	t.Helper()
	b.Items = slices.Clone(b.Items)
	for i, item := range b.Items {
		if item.Release != nil {
			release := *item.Release
			release.Data.Defaults = nil
			b.Items[i].Release = &release
		}
	}
	raw, err := json.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	return sha256.Sum256(raw)
}

// TestDigestIsTheHashOfTheJSON compares digests with and without cached documents. Agents of all versions calculate the
// same digest, so it must never change.
func TestDigestIsTheHashOfTheJSON(t *testing.T) {
	t.Parallel()
	object := func(name, text string) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": name},
			"data": map[string]any{"z": text, "a": int64(9007199254740993), "half": 0.5, "list": []any{nil, true}},
		}}
	}
	objects := []*unstructured.Unstructured{object("a", `<b>&"items":null`), object("b", "\u2028{\"objects\":null")}
	release := &bundle.Release{Name: "web", Namespace: "site", Data: bundle.ReleaseData{Values: json.RawMessage(`{"b":1,"a":2}`), Defaults: json.RawMessage(`{"c":3}`)}}
	owner := bundle.Owner{Kind: "ClusterProfile", Name: `"items":null`, Tier: 100}
	for name, b := range map[string]bundle.Bundle{
		"empty":       {},
		"no items":    {Owner: owner, Items: []bundle.Item{}},
		"no objects":  {Owner: owner, Items: []bundle.Item{{}, {Objects: []*unstructured.Unstructured{}}, {DecodeError: "no"}}},
		"nil object":  {Items: []bundle.Item{{Objects: []*unstructured.Unstructured{nil, {}}}}},
		"objects":     {Owner: owner, Items: []bundle.Item{{Objects: objects, Force: true}, {Objects: objects[:1], Reference: bundle.Reference{Kind: "Secret"}}}},
		"release":     {Owner: owner, Items: []bundle.Item{{Objects: objects, Release: release, Sensitive: true}}, Options: bundle.Options{CorrectDrift: true}},
		"cached":      {Owner: owner, Items: []bundle.Item{{Objects: objects, Release: release, Documents: kube.NewDocuments(objects)}}},
		"other cache": {Owner: owner, Items: []bundle.Item{{Objects: objects[1:], Documents: kube.NewDocuments(objects)}, {Documents: kube.NewDocuments(objects)}}},
	} {
		for range 2 {
			got, err := b.Digest()
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if want := plainDigest(t, b); got != want {
				t.Errorf("%s: got %s, want %s", name, got, want)
			}
		}
	}
	if release.Data.Defaults == nil {
		t.Error("the release was changed")
	}
}

// BenchmarkDigest calculates the digest of 200 objects with and without cached documents.
func BenchmarkDigest(b *testing.B) {
	var objects []*unstructured.Unstructured
	for range 200 {
		objects = append(objects, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "a"}, "data": map[string]any{"text": string(make([]byte, 1000))},
		}})
	}
	for name, documents := range map[string]*kube.Documents{"plain": nil, "cached": kube.NewDocuments(objects)} {
		b.Run(name, func(b *testing.B) {
			content := bundle.Bundle{Items: []bundle.Item{{Objects: objects, Documents: documents}}}
			for b.Loop() {
				if _, err := content.Digest(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
