package inventory

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// maxContent and maxEntries limit the JSON of the content and of the entries of a record, in bytes. A hub reads records
// of members that it must not trust: compressed zeros in one Secret would take gigabytes of its memory.
const (
	maxContent = 256 << 20
	maxEntries = 32 << 20
)

// compressor compresses values as JSON. Its encoders and decoders, each of which has about a megabyte of tables, are in
// pools. It is safe for concurrent use.
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

// unpack is the reverse of pack.
func (c *compressor) unpack(packed []byte, into any) error {
	raw, err := c.decompress(packed)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	return nil
}

// unpackEntries is unpack for entries. It stops at the first one without a kind: a list of empty objects would take
// a hundred times the memory of its JSON.
func (c *compressor) unpackEntries(packed []byte) ([]Entry, error) {
	raw, err := c.decompress(packed)
	if err != nil {
		return nil, err
	}
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
	_, err = decoder.Token()
	return entries, err
}

func (c *compressor) decompress(packed []byte) (raw []byte, err error) {
	decoder, ok := c.decoders.Get().(*zstd.Decoder)
	if !ok {
		if decoder, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(c.limit)); err != nil {
			return nil, fmt.Errorf("decompress: %w", err)
		}
	}
	defer c.decoders.Put(decoder)
	if raw, err = decoder.DecodeAll(packed, nil); err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	return raw, nil
}
