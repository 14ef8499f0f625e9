package hub

import (
	"reflect"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// compactMark replaces the managed fields of an object after compact. A reflector with a streaming list calls the
// transform function twice for each object, and the second call must not change the object, since it may share memory
// with cached objects. The mark differs from the managed fields of API servers, which are nil or not empty.
//
//nolint:gochecknoglobals // it never changes
var compactMark = []metav1.ManagedFieldsEntry{}

// isCompact returns whether an object has the compactMark.
func isCompact(object metav1.Object) bool {
	fields := object.GetManagedFields()
	return fields != nil && len(fields) == 0
}

const (
	// maxPooledString is the maximum length of a string in a stringPool, in bytes: longer strings are rarely equal.
	maxPooledString = 128
	// maxPooledStrings is the maximum number of strings in each of the two maps of a stringPool.
	maxPooledStrings = 20_000
)

// stringPool returns equal strings with the same memory. It keeps the strings that were used recently. The zero value
// is an empty pool. Its methods may be called concurrently.
type stringPool struct {
	mu sync.Mutex // guards the fields below
	// recent has the strings that were used last. When it is full, it replaces older, whose strings are dropped.
	recent, older map[string]string
}

// share returns the pooled string that is equal to s. If there is none, it adds s to the pool.
func (p *stringPool) share(s string) string {
	if s == "" || len(s) > maxPooledString {
		return s
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if shared, ok := p.recent[s]; ok {
		return shared
	}
	if shared, ok := p.older[s]; ok {
		s = shared
	}
	if p.recent == nil || len(p.recent) >= maxPooledStrings {
		p.recent, p.older = map[string]string{}, p.recent
	}
	p.recent[s] = s
	return s
}

// compact reduces the memory of a decoded object. Many strings, such as names of profiles, kinds and labels, are equal
// in the objects of all clusters, but the decoder allocates each of them, and it allocates slices with unused capacity.
// Afterwards equal strings share their memory, and slices have no unused capacity. value must be settable, and nothing
// else may refer to its parts.
func (p *stringPool) compact(value reflect.Value) {
	switch value.Kind() {
	case reflect.String:
		value.SetString(p.share(value.String()))
	case reflect.Pointer:
		if !value.IsNil() {
			p.compact(value.Elem())
		}
	case reflect.Struct:
		for _, field := range value.Fields() {
			if field.CanSet() {
				p.compact(field)
			}
		}
	case reflect.Slice:
		if value.Type().Elem().Kind() != reflect.Uint8 {
			p.compactSlice(value)
		}
	case reflect.Map:
		if texts, ok := value.Interface().(map[string]string); ok {
			for key, text := range texts {
				texts[p.share(key)] = p.share(text) // an assignment also replaces the key
			}
		}
	default:
	}
}

func (p *stringPool) compactSlice(value reflect.Value) {
	if value.Cap() > value.Len() {
		exact := reflect.MakeSlice(value.Type(), value.Len(), value.Len())
		reflect.Copy(exact, value)
		value.Set(exact)
	}
	for i := range value.Len() {
		p.compact(value.Index(i))
	}
}
