package hub

import (
	"reflect"
	"unique"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// compactMark replaces the managed fields of a compact object, and shows that it is compact. A reflector that streams a
// list transforms each object twice, and the second time the object can already share memory with cached objects, which
// must not be written. API servers return no empty list.
//
//nolint:gochecknoglobals // it never changes
var compactMark = []metav1.ManagedFieldsEntry{}

// isCompact returns whether an object has the compactMark.
func isCompact(object metav1.Object) bool {
	fields := object.GetManagedFields()
	return fields != nil && len(fields) == 0
}

// compact reduces the memory of a decoded object. Many strings, such as names of profiles, kinds and labels, are equal
// in the objects of all clusters, but the decoder allocates each of them, and it allocates slices with unused capacity.
// Afterwards equal strings share their memory, and slices have no unused capacity. value is settable, and nothing else
// refers to its parts.
func compact(value reflect.Value) {
	switch value.Kind() {
	case reflect.String:
		if value.Len() > 0 {
			value.SetString(unique.Make(value.String()).Value())
		}
	case reflect.Pointer:
		if !value.IsNil() {
			compact(value.Elem())
		}
	case reflect.Struct:
		for _, field := range value.Fields() {
			if field.CanSet() {
				compact(field)
			}
		}
	case reflect.Slice:
		compactSlice(value)
	case reflect.Map:
		if texts, ok := value.Interface().(map[string]string); ok {
			for key, text := range texts {
				texts[unique.Make(key).Value()] = unique.Make(text).Value() // an assignment also replaces the key
			}
		}
	default:
	}
}

func compactSlice(value reflect.Value) {
	if value.Cap() > value.Len() {
		exact := reflect.MakeSlice(value.Type(), value.Len(), value.Len())
		reflect.Copy(exact, value)
		value.Set(exact)
	}
	if value.Type().Elem().Kind() == reflect.Uint8 {
		return
	}
	for i := range value.Len() {
		compact(value.Index(i))
	}
}
