package source

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"text/template"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	kubejson "k8s.io/apimachinery/pkg/util/json"
)

// resourceFunctionNames returns the names of the functions in objectFunctions that read Resources.
func resourceFunctionNames() []string {
	return []string{"getResource", "copy", "getField", "setField", "removeField"}
}

// objectFunctions returns the template functions for objects of the hub. objects are the decoded objects of r.
func (r Resources) objectFunctions(objects map[string]any) template.FuncMap {
	// get returns a copy of an object, nil if an optional object does not exist.
	get := func(identifier string) (object map[string]any, err error) {
		if found, ok := objects[identifier].(map[string]any); ok {
			return withoutHubMetadata(found)
		}
		if !slices.Contains(r.Absent, identifier) {
			err = fmt.Errorf("templateResourceRefs has no identifier %q", identifier)
		}
		return nil, err
	}
	encode := func(object map[string]any, err error) (string, error) {
		if err != nil || object == nil {
			return "", err
		}
		return toYAML(object)
	}
	return template.FuncMap{
		"getResource": get,
		"copy":        func(identifier string) (string, error) { return encode(get(identifier)) },
		"getField": func(identifier, path string) (any, error) {
			object, err := get(identifier)
			value, found := valueAt(object, fieldNames(path))
			if err != nil || !found {
				return "", err
			}
			return value, nil
		},
		"setField": func(identifier, path string, value any) (string, error) {
			object, err := get(identifier)
			if err != nil || object == nil {
				return "", err
			}
			return encode(setField(object, path, value))
		},
		"removeField": func(identifier, path string) (string, error) {
			object, err := get(identifier)
			if err != nil || object == nil {
				return "", err
			}
			return encode(removeField(object, path))
		},
		"chainSetField":    setField,
		"chainRemoveField": removeField,
	}
}

// withoutHubMetadata returns a copy of an object of the hub that can be deployed to a member. On a member, the garbage
// collector would delete an object with an owner of the hub, and a finalizer of the hub would block its deletion.
func withoutHubMetadata(object map[string]any) (map[string]any, error) {
	copied, err := copyObject(object)
	if err != nil {
		return nil, err
	}
	for _, field := range []string{
		"managedFields", "resourceVersion", "uid", "generation", "creationTimestamp", "selfLink", "ownerReferences", "finalizers",
		"deletionTimestamp", "deletionGracePeriodSeconds",
	} {
		unstructured.RemoveNestedField(copied, "metadata", field)
	}
	unstructured.RemoveNestedField(copied, "metadata", "annotations", corev1.LastAppliedConfigAnnotation)
	return copied, nil
}

// setField returns a copy of object with a field set.
func setField(object map[string]any, path string, value any) (map[string]any, error) {
	copied, err := copyObject(object)
	if err != nil {
		return nil, err
	}
	if value, err = copyValue(value); err != nil {
		return nil, err
	}
	return copied, unstructured.SetNestedField(copied, value, fieldNames(path)...)
}

// removeField returns a copy of object without a field.
func removeField(object map[string]any, path string) (map[string]any, error) {
	copied, err := copyObject(object)
	if err != nil {
		return nil, err
	}
	unstructured.RemoveNestedField(copied, fieldNames(path)...)
	return copied, nil
}

func fieldNames(path string) []string { return strings.Split(strings.TrimPrefix(path, "."), ".") }

func copyObject(object map[string]any) (map[string]any, error) {
	copied, err := copyValue(object)
	if err != nil {
		return nil, err
	}
	fields, ok := copied.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("there is no object to change")
	}
	return fields, nil
}

// copyValue returns a deep copy of value as JSON types. Integers stay integers.
func copyValue(value any) (any, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("copy a value: %w", err)
	}
	var copied any
	err = kubejson.Unmarshal(raw, &copied)
	return copied, err
}
