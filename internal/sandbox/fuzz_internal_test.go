package sandbox

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzReceive reads what a child sends, which can run the code of an attacker, and decodes the result.
func FuzzReceive(f *testing.F) {
	for _, message := range []string{
		`{"output":{"a":[1,null,"\u0000\ud800"]},"error":"partly","invalid":true}`, `{"callback":{"kind":"ConfigMap"}}`, `{"callback":null,"output":null}`,
		`{"output":1}{"callback":2}`, `{"OUTPUT":1,"output":2,"Error":3}`, `{"output":`, `[]`, `null`, "", " \n\t", "\xff\x00", `{"error":"a\nb","invalid":1}`,
		strings.Repeat("[", 20_000), `{"output":` + strings.Repeat(`{"a":`, 9_000), `{"output":[` + strings.Repeat("{},", 10_000) + "0]}",
	} {
		f.Add([]byte(message))
	}
	f.Fuzz(func(t *testing.T, sent []byte) {
		var received response
		var err error
		const maxMemory = 64<<20 + 512<<10 // half of the total, and what needs no reservation
		reserved := kube.NewContentMemory(128 << 20).Reserve("eu")
		defer reserved.Release()
		fuzzing.Within(t, 2<<20+uint64(len(sent))*16, func() { received, err = (&child{out: bytes.NewReader(sent)}).receive(reserved) })
		fuzzing.OneLine(t, err)
		if err := reserved.Add(maxMemory - int64(len(received.Output)+len(received.Callback))); err != nil {
			t.Errorf("more is reserved than what was received: %v", err)
		}
		if err != nil {
			return
		}
		var output any
		fuzzing.Within(t, 2<<20+uint64(len(sent))*500, func() { _ = decodeResult(received, &output) }) // it has the text of the child
		if raw, err := marshal(output); err == nil && encodedSize(output)*3 < int64(len(raw)) {        // a number can have 24 bytes
			t.Errorf("%d bytes of JSON are estimated as %d", len(raw), encodedSize(output))
		}
		var encoded bytes.Buffer
		if err := write(&encoded, received); err != nil {
			t.Fatalf("encode %+v: %v", received, err)
		}
		again, err := (&child{out: &encoded}).receive(nil)
		if err != nil {
			t.Fatalf("read an encoded message: %v", err)
		}
		if again.Error != received.Error || again.Invalid != received.Invalid || !isSameJSON(again.Output, received.Output) || !isSameJSON(again.Callback, received.Callback) {
			t.Errorf("got %+v, and after encoding %+v", received, again)
		}
	})
}

// isSameJSON returns whether two texts are the same without spaces. An empty text is null.
func isSameJSON(a, b json.RawMessage) bool {
	var compactA, compactB bytes.Buffer
	return json.Compact(&compactA, a) == nil == (json.Compact(&compactB, b) == nil) && bytes.Equal(compactA.Bytes(), compactB.Bytes())
}
