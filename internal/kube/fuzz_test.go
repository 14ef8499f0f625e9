package kube_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

func FuzzDecodeManifest(f *testing.F) {
	for _, text := range []string{
		"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {text: |\n  a\n  b\n",
		"# comment\n---\napiVersion: v1\nkind: Secret\nmetadata: {name: a}\n--- # next\n{\"apiVersion\":\"v1\",\"kind\":\"List\",\"items\":[{\"metadata\":{\"name\":\"x\"}}]}",
		"apiVersion: v1\nkind: ConfigMapList\nitems:\n- metadata: {name: a}\n- metadata: {name: b}\n",
		"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n", "base: &base {a: 1}\n<<: *base\n<<: *base\n", "a: 1\na: 2\n", "- a\n", "--- |\n text", "a: &a text\nb: {<<: [*a], ? *a : *a}\n",
		"\ufeffapiVersion: v1\nkind: X\nmetadata: {name: 0x1}\nspec: {n: 9007199254740993, f: 1e300, inf: .inf, d: 2026-01-01, b: !!binary aGk=}\n", "{\"a\":",
	} {
		f.Add([]byte(text))
	}
	f.Add([]byte("apiVersion: v1\nkind: X\nmetadata: {name: a}\na: &a \"" + strings.Repeat("x", 9<<10) + "\"\nb: [" + strings.Repeat("*a,", 100) + "]\n"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		for name, decode := range map[string]func([]byte) ([]*unstructured.Unstructured, error){
			"with memory": func(stream []byte) ([]*unstructured.Unstructured, error) { return decodeReserving(t, stream) },
			"strict":      kube.DecodeManifest, "lenient": kube.DecodeLenient, "of Helm": kube.DecodeHelmManifest,
		} {
			var objects []*unstructured.Unstructured
			var err error
			fuzzing.Within(t, 64<<20+uint64(len(stream))*200, func() { objects, err = decode(bytes.Clone(stream)) })
			fuzzing.OneLine(t, err)
			if len(objects) > kube.MaxObjects {
				t.Errorf("%s: %d objects", name, len(objects))
			}
			for _, object := range objects {
				checkObject(t, object)
			}
		}
	})
}

// decodeReserving decodes a manifest with memory reserved for it, and checks that it has added what it returns.
func decodeReserving(t *testing.T, stream []byte) ([]*unstructured.Unstructured, error) {
	t.Helper()
	const maxMemory = 64<<20 + 512<<10 // half of the total, and what needs no reservation
	reserved := kube.NewContentMemory(128 << 20).Reserve("eu")
	defer reserved.Release()
	objects, added, err := kube.DecodeManifestReserving(reserved, stream)
	if added < 0 || added > maxMemory {
		t.Fatalf("%d bytes are added", added)
	}
	if err := reserved.Add(maxMemory - added); err != nil {
		t.Errorf("more is reserved than the %d bytes that were returned: %v", added, err)
	}
	return objects, err
}

// checkObject checks that an object has an identity, and that it stays the same when it is encoded and decoded.
func checkObject(t *testing.T, object *unstructured.Unstructured) {
	t.Helper()
	if ref := kube.RefOf(object); object.GetAPIVersion() == "" || ref.Kind == "" || ref.Name == "" {
		t.Errorf("an object without an identity: %v", object.Object)
	}
	raw, err := json.Marshal(object.Object)
	if err != nil {
		t.Fatalf("an object that cannot be encoded: %v", err)
	}
	again, err := kube.DecodeManifest(raw)
	if err != nil || len(again) != 1 {
		t.Fatalf("%s: %d objects, %v", raw, len(again), err)
	}
	if diff := cmp.Diff(object.Object, again[0].Object); diff != "" {
		t.Errorf("%s: another object after encoding and decoding (-first +second):\n%s", raw, diff)
	}
}
