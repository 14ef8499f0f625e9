package inventory

import (
	"encoding/json"
	"fmt"

	"github.com/klauspost/compress/zstd"
)

// pack compresses a value as JSON.
func pack(value any) ([]byte, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, fmt.Errorf("compress: %w", err)
	}
	defer encoder.Close()
	return encoder.EncodeAll(raw, nil), nil
}

// unpack is the reverse of pack.
func unpack(packed []byte, into any) error {
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return fmt.Errorf("decompress: %w", err)
	}
	defer decoder.Close()
	raw, err := decoder.DecodeAll(packed, nil)
	if err != nil {
		return fmt.Errorf("decompress: %w", err)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	return nil
}
