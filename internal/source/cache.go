package source

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"time"
)

// refusalLife is how long a chart that is not verified is refused without asking its repository again.
const refusalLife = time.Minute

// kept returns the chart that was ordered if it is on disk. What another process left there is checked against its
// digest once.
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
func (c *Charts) keep(found order, got download) (Chart, error) {
	kept := Chart{
		Digest:     digestOf(got.archive),
		Name:       got.metadata.Name,
		Version:    got.metadata.Version,
		AppVersion: got.metadata.AppVersion,
		Icon:       got.metadata.Icon,
	}
	kept.Path = c.archivePath(kept.Digest)
	entry, err := json.Marshal(kept)
	if err != nil {
		return Chart{}, fmt.Errorf("encode what is known of the chart: %w", err)
	}
	if err := c.write(kept.Path, got.archive); err != nil {
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

// refusal is the reason why an order was not verified.
type refusal struct {
	err error
	at  time.Time
}

// refusal returns the error of an order that was not verified within refusalLife. So a fleet that asks for a chart
// without a valid signature downloads it once a minute, and not once per cluster.
func (c *Charts) refusal(wanted order) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.refused, func(_ string, old refusal) bool { return c.clock.Since(old.at) >= refusalLife })
	return c.refused[wanted.key()].err
}

// refuse remembers err if it is about the chart, and not about the way to it.
func (c *Charts) refuse(wanted order, err error) {
	if !errors.Is(err, ErrUnverified) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refused[wanted.key()] = refusal{err: err, at: c.clock.Now()}
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
