package sandbox

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
)

// marshal encodes value. Unlike json.Marshal, it does not change the bytes of a json.RawMessage.
func marshal(value any) (json.RawMessage, error) {
	var encoded bytes.Buffer
	if err := write(&encoded, value); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(encoded.Bytes(), []byte("\n")), nil
}

func write(out io.Writer, value any) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return fmt.Errorf("encode a message: %w", err)
	}
	return nil
}
