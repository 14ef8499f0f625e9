package sandbox

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

func TestEncodedSize(t *testing.T) {
	t.Parallel()
	type input struct {
		Text    string
		Data    []byte
		Raw     json.RawMessage
		List    []int
		Map     map[string]any
		Pointer *string
		Empty   *string
		Flag    bool
		Skipped string `json:"-"`
	}
	text := strings.Repeat("text ", 1000)
	for name, value := range map[string]any{
		"nothing":            nil,
		"text":               text,
		"quotes":             strings.Repeat(`"\`, 1000),
		"control characters": strings.Repeat("\x01", 1000),
		"no UTF-8":           strings.Repeat("\xff", 1000),
		"line separators":    strings.Repeat("\u2028\u2029", 1000),
		"UTF-8":              strings.Repeat("ä世", 1000),
		"bytes":              []byte(text),
		"JSON":               json.RawMessage(`{"a":[` + strings.Repeat("1,", 1000) + `1]}`),
		"numbers":            make([]int, 1000),
		"map":                map[string]any{text: []any{text, true, 1.5, nil, map[string]any{"a": "b"}}},
		"struct": input{
			Text: text, Data: []byte(text), Raw: json.RawMessage(`{}`), List: []int{1, 2}, Map: map[string]any{"a": text}, Pointer: &text, Skipped: strings.Repeat(text, 100),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			encoded, err := marshal(value)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := encodedSize(value), int64(len(encoded)); got < want || got > 5*want+100 {
				t.Errorf("got %d bytes, want about %d", got, want)
			}
		})
	}
}

// BenchmarkEncodedSize compares the estimate with the encoding itself.
func BenchmarkEncodedSize(b *testing.B) {
	values := map[string]any{}
	for i := range 1000 {
		values[fmt.Sprint("key-", i)] = strings.Repeat("text ", 200)
	}
	b.Run("size", func(b *testing.B) {
		for b.Loop() {
			encodedSize(values)
		}
	})
	b.Run("encoding", func(b *testing.B) {
		for b.Loop() {
			if _, err := marshal(values); err != nil {
				b.Fatal(err)
			}
		}
	})
}
