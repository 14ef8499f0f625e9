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
func (d disk) get(key string) (Release, bool) {
	packed, err := os.ReadFile(d.path(key))
	if err != nil {
		return Release{}, false
	}
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderMaxMemory(maxRendering))
	if err != nil {
		return Release{}, false
	}
	defer decoder.Close()
	raw, err := decoder.DecodeAll(packed, nil)
	if err != nil {
		return Release{}, false
	}
	var kept storedRelease
	if utiljson.Unmarshal(raw, &kept) != nil {
		return Release{}, false
	}
	release := Release{Paths: kept.Paths, Chart: kept.Chart, Notes: kept.Notes, size: len(raw)}
	for _, content := range kept.Contents {
		release.Objects = append(release.Objects, &unstructured.Unstructured{Object: content})
	}
	return release, true
}

// storedRelease is a Release as it is in a file.
type storedRelease struct {
	Contents []map[string]any
	Paths    []string
	Chart    json.RawMessage
	Notes    string
}

func (d disk) put(key string, release Release) error {
	stored := storedRelease{Paths: release.Paths, Chart: release.Chart, Notes: release.Notes}
	for _, object := range release.Objects {
		stored.Contents = append(stored.Contents, object.Object)
	}
	raw, err := json.Marshal(stored)
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
