package source

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/towline/towline/internal/cache"
)

const (
	// unverifiedTTL is the time for which a failed verification is cached in Charts.failures.
	unverifiedTTL = time.Minute
	// missingTTL is the time for which ErrNotFound is cached. It is short: users deploy a chart right after they publish
	// it.
	missingTTL = 10 * time.Second
)

// cached returns the requested chart if its archive is on disk, and marks it as used. If the entry is not in memory, an
// earlier process may have written the archive, so its digest is verified.
func (c *Charts) cached(request chartRequest) (Chart, bool) {
	key := request.key()
	chart, ok := c.cachedCharts.Get(key)
	if ok {
		_, err := os.Stat(chart.Path)
		c.touch(key, chart)
		return chart, err == nil
	}
	raw, err := os.ReadFile(c.entryPath(key))
	if err != nil || json.Unmarshal(raw, &chart) != nil {
		return Chart{}, false
	}
	chart.Path = c.archivePath(chart.Digest)
	archive, err := os.ReadFile(chart.Path)
	if err != nil || archiveDigest(archive) != chart.Digest {
		return Chart{}, false
	}
	c.addCached(key, chart)
	c.touch(key, chart)
	return chart, true
}

// touch sets the time of the last use of the files of a chart.
func (c *Charts) touch(key string, chart Chart) {
	c.files.touch(chart.Path)
	c.files.touch(c.entryPath(key))
}

// store writes the archive and then the entry that refers to it, so that an entry never refers to a missing archive.
func (c *Charts) store(request chartRequest, got downloadedChart) (Chart, error) {
	chart := Chart{
		Digest:     archiveDigest(got.archive),
		Name:       got.metadata.Name,
		Version:    got.metadata.Version,
		AppVersion: got.metadata.AppVersion,
		Icon:       iconOf(got.metadata),
	}
	chart.Path = c.archivePath(chart.Digest)
	entry, err := json.Marshal(chart)
	if err != nil {
		return Chart{}, fmt.Errorf("encode the entry of the chart: %w", err)
	}
	if err := c.writeFile(chart.Path, got.archive); err != nil {
		return Chart{}, err
	}
	if err := c.writeFile(c.entryPath(request.key()), entry); err != nil {
		return Chart{}, err
	}
	c.addCached(request.key(), chart)
	return chart, nil
}

func (c *Charts) addCached(key string, chart Chart) {
	size := cache.MinSize + len(chart.Name) + len(chart.Version) + len(chart.AppVersion) + len(chart.Icon)
	c.cachedCharts.Put(key, chart, size)
}

// failedRequest is the error that the same request returns until an instant.
type failedRequest struct {
	err   error
	until time.Time
}

// cachedFailure returns the cached error of the same request, nil if there is none. Without it, each cluster would
// download a chart without a valid signature, or the index for a missing version.
func (c *Charts) cachedFailure(request chartRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.clock.Now()
	maps.DeleteFunc(c.failures, func(_ string, old failedRequest) bool { return !now.Before(old.until) })
	return c.failures[request.key()].err
}

// addFailure caches err for ttl.
func (c *Charts) addFailure(request chartRequest, err error, ttl time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures[request.key()] = failedRequest{err: err, until: c.clock.Now().Add(ttl)}
}

// writeFile writes a file atomically: another process reads all of it or nothing.
func (c *Charts) writeFile(path string, content []byte) error {
	file, err := os.CreateTemp(c.dir, partialPrefix)
	if err != nil {
		return fmt.Errorf("store the chart: %w", err)
	}
	defer os.Remove(file.Name()) // already renamed, unless something failed
	_, err = file.Write(content)
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("store the chart: %w", err)
	}
	return c.files.add(path)
}

func (c *Charts) archivePath(digest string) string { return filepath.Join(c.dir, digest+".tgz") }

func (c *Charts) entryPath(key string) string { return filepath.Join(c.dir, key+".json") }

func archiveDigest(archive []byte) string {
	sum := sha256.Sum256(archive)
	return hex.EncodeToString(sum[:])
}
