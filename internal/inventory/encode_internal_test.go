package inventory

import (
	"fmt"
	"testing"

	"github.com/towline/towline/internal/kube"
)

// BenchmarkPack shows the cost of one save of 100 entries.
func BenchmarkPack(b *testing.B) {
	var entries []Entry
	for i := range 100 {
		ref := kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "site", Name: fmt.Sprintf("object-%d", i)}
		entries = append(entries, Entry{Ref: ref, UID: "00000000-0000-0000-0000-000000000000", Fields: "0123456789abcdef"})
	}
	var used compressor
	b.ReportAllocs()
	for b.Loop() {
		packed, err := used.pack(entries)
		if err != nil {
			b.Fatal(err)
		}
		var got []Entry
		if err := used.unpack(packed, &got); err != nil || len(got) != len(entries) {
			b.Fatalf("got %d entries, error %v", len(got), err)
		}
	}
}
