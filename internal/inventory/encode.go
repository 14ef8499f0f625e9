package inventory

import (
	"encoding/json"
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// maxUnpacked limits the decompressed size of one value. The administrator of a member can replace a record there by
// one of a megabyte that decompresses to many gigabytes, which would take all memory of the hub or the agent.
const maxUnpacked = 128 << 20

// compressor compresses values as JSON. It reuses its encoders and decoders, each of which has about a megabyte of
// tables, until the next garbage collections. The zero compressor can be used. It is safe for concurrent use.
type compressor struct{ encoders, decoders sync.Pool }

// pack compresses a value as JSON.
func (c *compressor) pack(value any) ([]byte, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	if len(raw) > maxUnpacked {
		return nil, fmt.Errorf("it has more than %d MiB, and could not be read again", maxUnpacked>>20)
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
func (c *compressor) unpack(packed []byte, into any) (err error) {
	decoder, ok := c.decoders.Get().(*zstd.Decoder)
	if !ok {
		if decoder, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxUnpacked)); err != nil {
			return fmt.Errorf("decompress: %w", err)
		}
	}
	defer c.decoders.Put(decoder)
	raw, err := decoder.DecodeAll(packed, nil)
	if err != nil {
		return fmt.Errorf("decompress: %w", err)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	return nil
}
