package kube

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"testing"
	"testing/iotest"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"

	"github.com/towline/towline/test/fuzzing"
)

// FuzzBudget reads responses of members, with reads of the given sizes. The limits are small, so that inputs exceed
// them.
func FuzzBudget(f *testing.F) {
	for _, body := range []string{
		`{"kind":"List","apiVersion":"v1","items":[{"a":"\\\"kind"},[],{},null,1.5e3]}`, ` { "apiVersion" : "v1" , "kind" : "A" } `, "k8s\x00\x12\x00", "",
		`{"kind":"","apiVersion":"v1","password":"x"}`, `{"kind":"A","apiVersion":"v1/"}`, `{"kind":"A","apiVersion":["v1"]}`, `{"kind":null,"apiVersion":1}`,
		`{"kind":"A","apiVersion":"v1","KIND":""}`, `{"kind":"A","apiVersion":"v1","k\u0069nd":""}`, `{"kind":"A","apiVersion":"v1","apiVerſion":""}`,
		`{"kind":"A","kind":"","apiVersion":"v1"}`, `{"kind":"A","apiVersion":"group.example.com\u002f"}`, `{"a":{"kind":"A","apiVersion":"v1"}}`,
		`{"kind":"A"}{"apiVersion":"v1"}`, `["kind":"A","apiVersion":"v1"]`, `]{{"kind":"A","apiVersion":"v1"}`, `[[],[[]],{"a":{"a":{}},"b":[1,2]}]`,
		"a: {\"kind\": b, \"apiVersion\": c}\npassword: x\n",
	} {
		f.Add([]byte(body), []byte{1}, uint16(100), uint16(10))
		f.Add([]byte(body), []byte{7, 0, 3}, uint16(12), uint16(2))
	}
	f.Fuzz(func(t *testing.T, body, sizes []byte, maxBytes, maxValues uint16) {
		checkReads(t, body, sizes, int64(maxBytes), int64(maxValues))
		checkMemory(t, body, sizes)
		var whole jsonScanner
		whole.scan(body)
		if isObject := checkObject(t, body, sizes); isObject != (len(body) == 0 || whole.hasType()) {
			t.Errorf("%q: RequireObject accepts it: %t, in one part %t", body, isObject, !isObject)
		}
		if cap(whole.text) > 4*maxText {
			t.Errorf("the scanner keeps %d bytes", cap(whole.text))
		}
		var decoded any
		if json.Unmarshal(body, &decoded) == nil && whole.values() < elements(decoded) {
			t.Errorf("%q: counted %d values, want at least %d", body, whole.values(), elements(decoded))
		}
	})
}

// checkReads checks that the sizes of reads change neither the error nor the number of values of a body.
func checkReads(t *testing.T, body, sizes []byte, maxBytes, maxValues int64) {
	t.Helper()
	exceeded := errors.New("exceeded")
	for _, limits := range [][2]int64{{math.MaxInt64, math.MaxInt64}, {math.MaxInt64, math.MaxInt64 - 1}, {maxBytes, math.MaxInt64}, {maxBytes, maxValues}} {
		inParts, atOnce := NewBudget(limits[0], limits[1], exceeded), NewBudget(limits[0], limits[1], exceeded)
		var length int64
		var err error
		fuzzing.Within(t, 1<<20, func() {
			length, err = io.Copy(io.Discard, inParts.Limit(io.NopCloser(&partReader{rest: body, sizes: sizes})))
		})
		_, wantErr := io.CopyBuffer(struct{ io.Writer }{io.Discard}, atOnce.Limit(io.NopCloser(bytes.NewReader(body))), make([]byte, len(body)+1))
		// After Protobuf there are no further reads, so that sizes matter for the budget.
		if !errors.Is(err, wantErr) || !errors.Is(err, errProtobuf) && !errors.Is(inParts.Err(), atOnce.Err()) {
			t.Errorf("%q, limits %d: got errors %v and %v in parts, %v and %v at once", body, limits, err, inParts.Err(), wantErr, atOnce.Err())
		}
		if length > limits[0] {
			t.Errorf("%q: read %d bytes, want at most %d", body, length, limits[0])
		}
		if got, want := inParts.values.Load(), atOnce.values.Load(); err == nil && got != want {
			t.Errorf("%q, limits %d: %d values are left in parts, %d at once", body, limits, got, want)
		}
	}
}

// checkMemory checks that the sizes of reads do not change the memory that a response or the events of a watch need,
// and that nothing is reserved after the end.
func checkMemory(t *testing.T, body, sizes []byte) {
	t.Helper()
	for _, isWatch := range []bool{false, true} {
		var needed [2]int64
		var errs [2]error
		for i, reader := range []io.Reader{&partReader{rest: body, sizes: sizes}, bytes.NewReader(body)} {
			memory := NewResponseMemory(1 << 40)
			limited := memory.Limit(io.NopCloser(reader), "a", ContentObjects)
			if isWatch {
				limited = memory.LimitEvents(io.NopCloser(reader), "a", ContentObjects, false)
			}
			counted, _ := limited.(*reservingBody)
			counted.reservation.uncounted = 0
			_, errs[i] = io.CopyBuffer(struct{ io.Writer }{io.Discard}, counted, make([]byte, len(body)+1))
			needed[i] = counted.scanner.memoryOf(counted.bytes, counted.decodedType())
			if reserved := counted.reservation.reserved; reserved != needed[i] && errs[i] == nil {
				t.Errorf("%q: %d bytes are reserved, want %d", body, reserved, needed[i])
			}
			if err := counted.Close(); err != nil || counted.reservation.reserved != 0 {
				t.Errorf("%q: %d bytes are reserved after the end, error %v", body, counted.reservation.reserved, err)
			}
		}
		if !errors.Is(errs[0], errs[1]) || errs[0] == nil && needed[0] != needed[1] {
			t.Errorf("%q, watch %t: needs %d bytes in parts, error %v, and %d bytes at once, error %v", body, isWatch, needed[0], errs[0], needed[1], errs[1])
		}
	}
}

// checkObject returns whether RequireObject accepts a body. The errors of client-go for an accepted one do not have it.
func checkObject(t *testing.T, body, sizes []byte) bool {
	t.Helper()
	for _, reader := range []io.Reader{&partReader{rest: body, sizes: sizes}, iotest.DataErrReader(&partReader{rest: body, sizes: sizes})} {
		fuzzing.Within(t, 1<<20, func() {
			if _, err := io.Copy(io.Discard, RequireObject(io.NopCloser(reader))); err != nil && !errors.Is(err, errNoObject) {
				t.Errorf("%q: %v", body, err)
			}
		})
	}
	read, err := io.ReadAll(RequireObject(io.NopCloser(&partReader{rest: body, sizes: sizes})))
	if err != nil || len(body) == 0 {
		return err == nil
	}
	if !bytes.Equal(read, body) {
		t.Errorf("%q became %q", body, read)
	}
	wantDecodable(t, body)
	return true
}

// wantDecodable checks that each decoder finds a kind and an apiVersion in body, if it is JSON.
func wantDecodable(t *testing.T, body []byte) {
	t.Helper()
	var fields map[string]any
	if json.Valid(body) {
		if err := json.Unmarshal(body, &fields); err != nil {
			t.Errorf("%q is no object: %v", body, err)
		}
		for _, field := range []string{fieldKind, fieldVersion} {
			if text, _ := fields[field].(string); text == "" {
				t.Errorf("%q has no %s", body, field)
			}
		}
	}
	codecs := serializer.NewCodecFactory(runtime.NewScheme())
	info, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	for _, decoder := range []runtime.Decoder{info.Serializer, unstructured.UnstructuredJSONScheme} {
		if _, _, err := decoder.Decode(body, nil, nil); runtime.IsMissingKind(err) || runtime.IsMissingVersion(err) {
			t.Errorf("the error for %q repeats it: %v", body, err)
		}
	}
}

// elements returns the number of fields and elements in a decoded value, with one for each empty container.
func elements(value any) int64 {
	var number int64
	switch container := value.(type) {
	case map[string]any:
		number = max(1, int64(len(container)))
		for _, field := range container {
			number += elements(field)
		}
	case []any:
		number = max(1, int64(len(container)))
		for _, element := range container {
			number += elements(element)
		}
	}
	return number
}

// partReader returns the rest of a body in parts of the given sizes, over and over.
type partReader struct {
	rest, sizes []byte
	reads       int
}

// Read implements io.Reader.
func (r *partReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		return 0, io.EOF
	}
	size := len(r.rest)
	if len(r.sizes) > 0 {
		size = max(1, int(r.sizes[r.reads%len(r.sizes)]))
	}
	r.reads++
	n := copy(p, r.rest[:min(size, len(r.rest))])
	r.rest = r.rest[n:]
	return n, nil
}
