package inventory

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/towline/towline/internal/kube"
)

// TestUnpackIsBounded unpacks a record that decompresses to more than any record has.
func TestUnpackIsBounded(t *testing.T) {
	t.Parallel()
	encoder, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	packed := encoder.EncodeAll(append(bytes.Repeat([]byte(" "), maxUnpacked), "[]"...), nil)
	var used compressor
	var entries []Entry
	if err := used.unpack(packed, &entries); !errors.Is(err, zstd.ErrDecoderSizeExceeded) {
		t.Errorf("got %v from %d bytes, want an error of the limit", err, len(packed))
	}
}

// TestPackRefusesValuesThatUnpackRefuses packs a value of more than the limit.
func TestPackRefusesValuesThatUnpackRefuses(t *testing.T) {
	t.Parallel()
	var used compressor
	if _, err := used.pack(strings.Repeat("a", maxUnpacked)); err == nil || !strings.Contains(err.Error(), "more than 128 MiB") {
		t.Errorf("got %v", err)
	}
}

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
