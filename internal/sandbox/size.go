package sandbox

import (
	"encoding/json"
	"reflect"
	"unicode/utf8"
)

const (
	// encodedCost is the memory to send a message, in bytes for each byte of its JSON: the buffers of two encoders, which
	// double their size, and the message.
	encodedCost = 4
	// scalarSize is the size of a number, a bool or null in JSON, with its separator, in bytes.
	scalarSize = 8
)

// encodedSize returns the approximate size of value as JSON, in bytes.
func encodedSize(value any) int64 { return sizeOfValue(reflect.ValueOf(value)) }

func sizeOfValue(v reflect.Value) int64 {
	switch v.Kind() {
	case reflect.String:
		return sizeOfText(v.String())
	case reflect.Slice, reflect.Array:
		return sizeOfList(v)
	case reflect.Map:
		size := int64(2)
		for entries := v.MapRange(); entries.Next(); {
			size += sizeOfValue(entries.Key()) + sizeOfValue(entries.Value())
		}
		return size
	case reflect.Struct:
		return sizeOfFields(v)
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			return sizeOfValue(v.Elem())
		}
	}
	return scalarSize
}

func sizeOfList(v reflect.Value) int64 {
	switch {
	case v.Type() == reflect.TypeFor[json.RawMessage]():
		return int64(v.Len()) + 1
	case v.Type().Elem().Kind() == reflect.Uint8:
		return int64(v.Len())*4/3 + 4 // base64
	}
	size := int64(2)
	for i := range v.Len() {
		size += sizeOfValue(v.Index(i)) + 1
	}
	return size
}

func sizeOfFields(v reflect.Value) int64 {
	size := int64(2)
	for i := range v.NumField() {
		field := v.Type().Field(i)
		if field.IsExported() && field.Tag.Get("json") != "-" {
			size += int64(len(field.Name)) + 4 + sizeOfValue(v.Field(i))
		}
	}
	return size
}

// sizeOfText returns the size of a text as JSON. Control characters, line separators and invalid UTF-8 bytes take six
// bytes.
func sizeOfText(text string) int64 {
	size := int64(len(text)) + 2
	for i := 0; i < len(text); {
		switch c := text[i]; {
		case c >= utf8.RuneSelf:
			r, length := utf8.DecodeRuneInString(text[i:])
			if isEscaped := r == utf8.RuneError && length == 1 || r == '\u2028' || r == '\u2029'; isEscaped {
				size += 6 - int64(length)
			}
			i += length
			continue
		case c < ' ':
			size += 5
		case c == '"', c == '\\':
			size++
		}
		i++
	}
	return size
}
