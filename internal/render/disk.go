package render

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/zstd"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utiljson "k8s.io/apimachinery/pkg/util/json"
)

// disk keeps the renderings that could not be done again with the same result.
type disk struct{ dir string }

func newDisk(dir string) (disk, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return disk{}, fmt.Errorf("make the directory for renderings: %w", err)
	}
	return disk{dir: dir}, nil
}

func (d disk) path(key string) string { return filepath.Join(d.dir, key+".json.zst") }

// get returns what was put under key; what cannot be read was not.
func (d disk) get(key string) (rendering, bool) {
	packed, err := os.ReadFile(d.path(key))
	if err != nil {
		return rendering{}, false
	}
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(maxRendering))
	if err != nil {
		return rendering{}, false
	}
	defer decoder.Close()
	raw, err := decoder.DecodeAll(packed, nil)
	if err != nil {
		return rendering{}, false
	}
	var contents []map[string]any
	if utiljson.Unmarshal(raw, &contents) != nil {
		return rendering{}, false
	}
	kept := rendering{size: len(raw)}
	for _, content := range contents {
		kept.objects = append(kept.objects, &unstructured.Unstructured{Object: content})
	}
	return kept, true
}

func (d disk) put(key string, rendered rendering) error {
	contents := make([]map[string]any, 0, len(rendered.objects))
	for _, object := range rendered.objects {
		contents = append(contents, object.Object)
	}
	raw, err := json.Marshal(contents)
	if err != nil {
		return fmt.Errorf("encode a rendering: %w", err)
	}
	encoder, err := zstd.NewWriter(nil)
	if err != nil {
		return fmt.Errorf("compress a rendering: %w", err)
	}
	defer encoder.Close()
	file, err := os.CreateTemp(d.dir, "partial-")
	if err != nil {
		return fmt.Errorf("keep a rendering: %w", err)
	}
	defer os.Remove(file.Name()) // gone already if all went well
	_, err = file.Write(encoder.EncodeAll(raw, nil))
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(file.Name(), d.path(key))
	}
	if err != nil {
		return fmt.Errorf("keep a rendering: %w", err)
	}
	return nil
}
