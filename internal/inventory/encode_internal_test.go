package inventory

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/kube"
)

// BenchmarkPack shows the cost of one save of 100 entries.
func BenchmarkPack(b *testing.B) {
	var entries []Entry
	for i := range 100 {
		ref := kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "site", Name: fmt.Sprintf("object-%d", i)}
		entries = append(entries, Entry{Ref: ref, UID: "00000000-0000-0000-0000-000000000000", Fingerprint: "0123456789abcdef"})
	}
	used := compressor{limit: maxEntries}
	b.ReportAllocs()
	for b.Loop() {
		packed, err := used.pack(entries)
		if err != nil {
			b.Fatal(err)
		}
		var got []Entry
		err = used.unpack(b.Context(), packed, nil, kube.TypeAny, func(raw []byte) (err error) { got, err = decodeEntries(raw); return err })
		if err != nil || len(got) != len(entries) {
			b.Fatalf("got %d entries, error %v", len(got), err)
		}
	}
}

func TestDecodeEntries(t *testing.T) {
	t.Parallel()
	entries := []Entry{{Ref: kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "site", Name: "a"}, UID: "u"}, {Ref: kube.Ref{Version: "v1", Kind: "Namespace", Name: "site"}}}
	c := compressor{limit: maxEntries}
	for name, test := range map[string]struct {
		value   any
		want    []Entry
		wantErr bool
	}{
		"entries":         {value: entries, want: entries},
		"no entries":      {value: []Entry(nil)},
		"an empty list":   {value: []Entry{}},
		"an empty entry":  {value: []struct{}{{}, {}}, wantErr: true},
		"an object":       {value: map[string]string{"ref": "x"}, wantErr: true},
		"a list of texts": {value: []string{"x"}, wantErr: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			packed, err := c.pack(test.value)
			if err != nil {
				t.Fatal(err)
			}
			var got []Entry
			err = c.unpack(t.Context(), packed, nil, kube.TypeAny, func(raw []byte) (err error) { got, err = decodeEntries(raw); return err })
			if (err != nil) != test.wantErr {
				t.Errorf("error %v", err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("entries (-want +got):\n%s", diff)
			}
		})
	}
}

// TestUnpackIsLimited unpacks a value of 2 MiB that takes a few bytes of a Secret.
func TestUnpackIsLimited(t *testing.T) {
	t.Parallel()
	value := strings.Repeat("a", 2<<20)
	unlimited, limited := compressor{limit: 4 << 20}, compressor{limit: 1 << 20}
	packed, err := unlimited.pack(value)
	if err != nil || len(packed) > 1<<10 {
		t.Fatalf("%d bytes, error %v", len(packed), err)
	}
	var got string
	if err := limited.unpack(t.Context(), packed, nil, kube.TypeAny, decodeInto(&got)); err == nil {
		t.Error("a value above the limit was unpacked")
	}
	if _, err := limited.pack(value); err == nil {
		t.Error("a value above the limit was packed: it could not be read again")
	}
	if err := unlimited.unpack(t.Context(), packed, nil, kube.TypeAny, decodeInto(&got)); err != nil || got != value {
		t.Errorf("got %d bytes, error %v", len(got), err)
	}
}
