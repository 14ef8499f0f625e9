package kube

import (
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// ToUnstructured returns a copy of obj, with its kind and without its status, for a write request. It omits
// creationTimestamp, which typed objects can encode as null.
func ToUnstructured(scheme *runtime.Scheme, obj client.Object) (*unstructured.Unstructured, error) {
	gvk, err := apiutil.GVKForObject(obj, scheme)
	if err != nil {
		return nil, fmt.Errorf("encode an object: %w", err)
	}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", gvk.Kind, obj.GetName(), err)
	}
	out := &unstructured.Unstructured{Object: fields}
	out.SetGroupVersionKind(gvk)
	unstructured.RemoveNestedField(out.Object, "status")
	for _, path := range [][]string{{"metadata"}, {"spec", "template", "metadata"}} {
		unstructured.RemoveNestedField(out.Object, append(path, "creationTimestamp")...)
	}
	return out, nil
}
