package engine

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
)

// TestExcludeFields tests the content of apply requests for existing objects.
func TestExcludeFields(t *testing.T) {
	t.Parallel()
	const granular, atomic = `{"f:spec":{"f:a":{},"f:map":{"f:x":{}}}}`, `{"f:spec":{"f:a":{},"f:map":{},"f:list":{}}}`
	const keyed = `{"f:spec":{"f:list":{"k:{\"port\":1,\"protocol\":\"TCP\"}":{".":{},"f:port":{},"f:name":{}}}}}`
	for name, test := range map[string]struct {
		fields, version   string
		desired, existing string // the spec
		path              jsonPath
		want              string // the spec
		hasExisting       bool
		released          string // the released fields; "{}" if none
	}{
		"a field without owner":         {granular, "", `{"a":1,"b":1}`, `{"a":1,"b":2}`, jsonPath{"b"}, `{"a":1}`, false, `{"f:spec":{"f:b":{}}}`},
		"a field that is not delivered": {granular, "", `{"a":1}`, `{"a":1,"map":{"x":2}}`, jsonPath{"map", "x"}, `{"a":1}`, false, `{"f:spec":{"f:map":{"f:x":{}}}}`},
		"the last field of a map":       {granular, "", `{"a":1,"map":{"x":1}}`, `{"a":1}`, jsonPath{"map", "x"}, `{"a":1}`, false, `{"f:spec":{"f:map":{"f:x":{}}}}`},
		"an empty map":                  {granular, "", `{"a":1,"map":{}}`, `{"a":1,"map":{}}`, jsonPath{"map", "x"}, `{"a":1,"map":{}}`, false, `{"f:spec":{"f:map":{"f:x":{}}}}`},
		"a field of an atomic map":      {atomic, "", `{"a":1,"map":{"x":1,"y":1}}`, `{"a":1,"map":{"x":2}}`, jsonPath{"map", "x"}, `{"a":1,"map":{"x":2,"y":1}}`, true, `{}`},
		"an absent field of an atomic":  {atomic, "", `{"a":1,"map":{"x":1,"y":1}}`, `{"a":1,"map":{"y":2}}`, jsonPath{"map", "x"}, `{"a":1,"map":{"y":1}}`, false, `{}`},
		"an item of an atomic list":     {atomic, "", `{"list":["x","y"]}`, `{"list":["a","b","c"]}`, jsonPath{"list", "1"}, `{"list":["x","b"]}`, true, `{}`},
		"an item with a default key": {keyed, "", `{"list":[{"port":1,"name":"x"}]}`, `{"list":[{"port":2,"protocol":"TCP"},{"port":1,"protocol":"TCP","name":"y"}]}`,
			jsonPath{"list", "0", "name"}, `{"list":[{"port":1}]}`, false, `{"f:spec":{"f:list":{"k:{\"port\":1,\"protocol\":\"TCP\"}":{"f:name":{}}}}}`},
		"a key": {keyed, "", `{"list":[{"port":1}]}`, `{"list":[{"port":1,"protocol":"TCP"}]}`, jsonPath{"list", "0", "port"}, `{"list":[{"port":1}]}`, false, `{}`},
		"an item that does not exist": {keyed, "", `{"list":[{"port":3,"name":"x"}]}`, `{"list":[{"port":1,"protocol":"TCP"}]}`,
			jsonPath{"list", "0", "name"}, `{"list":[{"port":3,"name":"x"}]}`, false, `{}`},
		"another API version": {granular, "v0", `{"a":1,"b":1}`, `{"a":1,"b":2}`, jsonPath{"b"}, `{"a":1,"b":2}`, true, `{}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			decode := func(text string) (value map[string]any) {
				if err := json.Unmarshal([]byte(`{"apiVersion":"v1","spec":`+text+`}`), &value); err != nil {
					t.Fatal(err)
				}
				return value
			}
			existing := &unstructured.Unstructured{Object: decode(test.existing)}
			entry := metav1.ManagedFieldsEntry{Manager: kube.FieldManager, Operation: metav1.ManagedFieldsOperationApply, APIVersion: "v1", FieldsV1: &metav1.FieldsV1{}}
			if test.version != "" {
				entry.APIVersion = test.version
			}
			entry.FieldsV1.SetRawBytes([]byte(test.fields))
			existing.SetManagedFields([]metav1.ManagedFieldsEntry{entry})
			desired := decode(test.desired)
			r, err := excludeFields(desired, existing, []jsonPath{slices.Concat(jsonPath{"spec"}, test.path)})
			if err != nil {
				t.Fatal(err)
			}
			released, err := r.excluded.ToJSON()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(decode(test.want), r.content); diff != "" || r.hasExisting != test.hasExisting || string(released) != test.released {
				t.Errorf("hasExisting %v, released %s, content (-want +got):\n%s", r.hasExisting, released, diff)
			}
			if diff := cmp.Diff(decode(test.desired), desired); diff != "" {
				t.Errorf("the bundle was changed (-want +got):\n%s", diff)
			}
		})
	}
}

// TestLastItemsFirst tests the order of paths: the deletion of a list item must not change the index of a later path.
func TestLastItemsFirst(t *testing.T) {
	t.Parallel()
	got := lastItemsFirst([]jsonPath{{"items", "0"}, {"items", "2", "image"}, {"items", "10"}, {"data"}, {"items", "0"}})
	if diff := cmp.Diff([]jsonPath{{"items", "10"}, {"items", "2", "image"}, {"items", "0"}, {"data"}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
