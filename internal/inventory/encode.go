package inventory

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/towline/towline/internal/kube"
)

// maxContent and maxEntries limit the JSON of the content and of the entries of a record, in bytes. A hub reads records
// of members that it must not trust: compressed zeros in one Secret would take gigabytes of its memory.
const (
	maxContent = 256 << 20
	maxEntries = 32 << 20
)

// maxUnsized is the maximum size, in bytes, of a value whose zstd frame has no size: the encoder of pack omits
// FrameContentSize only for up to 255 bytes. Larger values without a size are rejected.
const maxUnsized = 255

// compressor compresses values as JSON. It keeps encoders and decoders in pools, because each of them has tables of
// about a megabyte. It is safe for concurrent use.
type compressor struct {
	// limit is the maximal size of the JSON of a value, in bytes.
	limit              uint64
	encoders, decoders sync.Pool
}

// pack compresses a value as JSON.
func (c *compressor) pack(value any) ([]byte, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	if uint64(len(raw)) > c.limit {
		return nil, fmt.Errorf("it has %d bytes, the limit is %d MiB", len(raw), c.limit>>20)
	}
	encoder, ok := c.encoders.Get().(*zstd.Encoder)
	if !ok {
		if encoder, err = zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1)); err != nil {
			return nil, fmt.Errorf("compress: %w", err)
		}
	}
	defer c.encoders.Put(encoder)
	return encoder.EncodeAll(raw, nil), nil
}

// unpack is the reverse of pack: it decompresses a value, and calls decode with its JSON. Until decode returns, it
// reserves memory for the JSON and the decoded value. decoded selects the estimate for this value. The memory counts
// for the same namespace as records, the Reservation of the cached records; nil means no limit. If the value is
// invalid, the error wraps ErrIncomplete.
func (c *compressor) unpack(ctx context.Context, packed []byte, records *kube.Reservation, decoded kube.DecodedType, decode func(raw []byte) error) error {
	var header zstd.Header
	if err := header.Decode(packed); err != nil || header.FrameContentSize > c.limit {
		return fmt.Errorf("%w: it is not a compressed value of at most %d MiB", ErrIncomplete, c.limit>>20)
	}
	size := int64(header.FrameContentSize)
	if !header.HasFCS {
		size = maxUnsized
	}
	memory := records.ForSameNamespace()
	defer memory.Close()
	if err := memory.Resize(ctx, size); err != nil {
		return err
	}
	raw, err := c.decompress(packed, size)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrIncomplete, err)
	}
	if memory != nil { // without a limit, MemoryOf would scan the JSON for nothing
		if err := memory.Resize(ctx, kube.MemoryOf(raw, decoded)); err != nil {
			return err
		}
	}
	return decode(raw)
}

// decodeInto returns a function that decodes JSON into value.
func decodeInto(value any) func(raw []byte) error {
	return func(raw []byte) error {
		if err := json.Unmarshal(raw, value); err != nil {
			return fmt.Errorf("%w: decode: %w", ErrIncomplete, err)
		}
		return nil
	}
}

// decompress returns the JSON of a value, of size bytes at most.
func (c *compressor) decompress(packed []byte, size int64) (raw []byte, err error) {
	decoder, ok := c.decoders.Get().(*zstd.Decoder)
	if !ok {
		if decoder, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecodeAllCapLimit(true)); err != nil {
			return nil, fmt.Errorf("decompress: %w", err)
		}
	}
	defer c.decoders.Put(decoder)
	if raw, err = decoder.DecodeAll(packed, make([]byte, 0, size)); err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	return raw, nil
}

// decodeEntries decodes entries. It stops at the first one without a kind: a list of empty objects would take a hundred
// times the memory of its JSON.
func decodeEntries(raw []byte) ([]Entry, error) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	if start, err := decoder.Token(); err != nil || start == nil { // null: no entries
		return nil, err
	}
	var entries []Entry
	for decoder.More() {
		var entry Entry
		if err := decoder.Decode(&entry); err != nil {
			return nil, fmt.Errorf("decode: %w", err)
		}
		if entry.Ref.Kind == "" {
			return nil, errors.New("decode: an entry has no kind")
		}
		entries = append(entries, entry)
	}
	_, err := decoder.Token()
	return entries, err
}
