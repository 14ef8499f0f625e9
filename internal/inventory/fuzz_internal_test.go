package inventory

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzUnpack reads records, which the administrators of a member can change.
func FuzzUnpack(f *testing.F) {
	used := compressor{limit: maxEntries}
	packed, err := used.pack([]Entry{{Ref: kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "a", Name: "b"}, UID: "c", Fingerprint: "d"}})
	if err != nil {
		f.Fatal(err)
	}
	encoder, err := zstd.NewWriter(nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(packed)
	f.Add(encoder.EncodeAll([]byte(`[{"Kind":1}]`), nil))
	f.Add(encoder.EncodeAll(make([]byte, 2<<20), nil))
	f.Add([]byte("\x28\xb5\x2f\xfd"))
	f.Add([]byte(`[{"Kind":"ConfigMap"}]`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var entries []Entry
		var err error
		fuzzing.Within(t, 3*maxEntries+64<<20, func() { err = used.unpack(t.Context(), raw, nil, kube.TypeAny, decodeInto(&entries)) })
		fuzzing.OneLine(t, err)
		for _, stored := range [][]Entry{entries, entriesIn(raw)} {
			packed, err := used.pack(stored)
			if err != nil {
				t.Fatal(err)
			}
			var again []Entry
			if err := used.unpack(t.Context(), packed, nil, kube.TypeAny, decodeInto(&again)); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(stored, again); diff != "" {
				t.Errorf("other entries after packing and unpacking (-first +second):\n%s", diff)
			}
		}
	})
}

func entriesIn(raw []byte) []Entry {
	var entries []Entry
	if json.Unmarshal(raw, &entries) != nil {
		return nil
	}
	return entries
}

// FuzzParseID reads annotations of Secrets on a member.
func FuzzParseID(f *testing.F) {
	f.Add("ClusterSummary/eu-1/Resources")
	f.Add("Work/a/b/c")
	f.Add("//")
	f.Add("a")
	f.Fuzz(func(t *testing.T, text string) {
		id, ok := ParseID(text)
		if ok && id.String() != text {
			t.Errorf("%q became %q", text, id.String())
		}
		if !ok && id != (bundle.ID{}) {
			t.Errorf("%q is refused, and became %+v", text, id)
		}
	})
}
