package source

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"helm.sh/helm/v4/pkg/chart/v2/loader"
)

// kept returns the chart that was ordered if it is on disk. What another process left there is checked against its digest once.
func (c *Charts) kept(wanted order) (Chart, bool) {
	key := wanted.key()
	c.mu.Lock()
	kept, known := c.known[key]
	c.mu.Unlock()
	if known {
		_, err := os.Stat(kept.Path)
		return kept, err == nil
	}
	raw, err := os.ReadFile(c.entryPath(key))
	if err != nil || json.Unmarshal(raw, &kept) != nil {
		return Chart{}, false
	}
	kept.Path = c.archivePath(kept.Digest)
	archive, err := os.ReadFile(kept.Path)
	if err != nil || digestOf(archive) != kept.Digest {
		return Chart{}, false
	}
	c.remember(key, kept)
	return kept, true
}

// keep writes the archive and then the entry that leads to it, so that no half-written archive can ever be read.
func (c *Charts) keep(found order, archive []byte) (Chart, error) {
	loaded, err := loader.LoadArchive(bytes.NewReader(archive))
	if err != nil {
		return Chart{}, fmt.Errorf("read the archive: %w", err)
	}
	metadata := loaded.Metadata
	kept := Chart{
		Digest:     digestOf(archive),
		Name:       metadata.Name,
		Version:    metadata.Version,
		AppVersion: metadata.AppVersion,
		Icon:       metadata.Icon,
	}
	kept.Path = c.archivePath(kept.Digest)
	entry, err := json.Marshal(kept)
	if err != nil {
		return Chart{}, fmt.Errorf("encode what is known of the chart: %w", err)
	}
	if err := c.write(kept.Path, archive); err != nil {
		return Chart{}, err
	}
	if err := c.write(c.entryPath(found.key()), entry); err != nil {
		return Chart{}, err
	}
	c.remember(found.key(), kept)
	return kept, nil
}

func (c *Charts) remember(key string, kept Chart) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[key] = kept
}

func (c *Charts) write(path string, content []byte) error {
	file, err := os.CreateTemp(c.dir, "partial-")
	if err != nil {
		return fmt.Errorf("keep the chart: %w", err)
	}
	defer os.Remove(file.Name()) // gone already if all went well
	_, err = file.Write(content)
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("keep the chart: %w", err)
	}
	return nil
}

func (c *Charts) archivePath(digest string) string { return filepath.Join(c.dir, digest+".tgz") }

func (c *Charts) entryPath(key string) string { return filepath.Join(c.dir, key+".json") }

func digestOf(archive []byte) string {
	sum := sha256.Sum256(archive)
	return hex.EncodeToString(sum[:])
}
