package summaries

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzDecodeGenerated reads stored values, which anyone with access to Secrets of the hub's namespace can write.
func FuzzDecodeGenerated(f *testing.F) {
	encoded, err := encodeGenerated(render.Generated{"a": json.RawMessage(`"b"`)})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(encoded)
	f.Add([]byte("\x28\xb5\x2f\xfd"))
	f.Add([]byte(`{"a":{"b":[1,2]}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var values render.Generated
		var err error
		fuzzing.Within(t, 4*maxGeneratedDecoded, func() { values, err = decodeGenerated(raw) })
		fuzzing.OneLine(t, err)
		given := render.Generated{}
		if err != nil && json.Unmarshal(raw, &given) == nil {
			values = given
		}
		if len(values) == 0 {
			return
		}
		encoded, err := encodeGenerated(values)
		if err != nil {
			return // too large
		}
		again, err := decodeGenerated(encoded)
		if err != nil {
			t.Fatal(err)
		}
		first, _ := json.Marshal(values)
		second, _ := json.Marshal(again)
		if diff := cmp.Diff(string(first), string(second)); diff != "" {
			t.Errorf("other values after encoding and decoding (-first +second):\n%s", diff)
		}
	})
}
