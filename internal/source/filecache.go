package source

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// maxChartDirSize and maxArtifactDirSize limit the directories of charts and of artifacts in bytes. The kubelet evicts
	// a pod whose emptyDir exceeds its sizeLimit (2 GiB by default for the hub), so profiles could otherwise stop the hub.
	maxChartDirSize    = 1 << 30
	maxArtifactDirSize = 512 << 20
	// minFileSize is the counted size of a smaller file: about one block of the disk.
	minFileSize = 4 << 10
	// partialPrefix and packagePrefix are the prefixes of temporary files and directories. A start of the hub deletes
	// those that are temporaryFileTTL old. The hub of another shard can share the directory and use younger ones.
	partialPrefix, packagePrefix = "partial-", "package-"
	temporaryFileTTL             = 10 * time.Minute
	// touchInterval is the precision of the recorded time of the last use of a file.
	touchInterval = time.Minute
)

// fileCache is a directory with files up to a total size. The least recently used files are deleted first. The time of
// the last use is the modification time, which survives restarts. It is safe for concurrent use.
type fileCache struct {
	dir string

	mu    sync.Mutex // guards the fields below; no other lock is acquired while it is held
	limit int64
	// used is at least the size of all files: a replaced file counts twice until evict computes used again.
	used int64
}

// newFileCache creates dir if it does not exist. It deletes the temporary files of a killed hub, and files until the
// limit holds.
func newFileCache(dir string, limit int64) (*fileCache, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create the directory %s: %w", filepath.Base(dir), err)
	}
	if err := deleteOldTemporaryFiles(dir, time.Now().Add(-temporaryFileTTL)); err != nil {
		return nil, err
	}
	f := &fileCache{dir: dir, limit: limit}
	return f, f.evict()
}

// deleteOldTemporaryFiles deletes the temporary files and directories in dir that have not changed after since.
func deleteOldTemporaryFiles(dir string, since time.Time) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list the cached files: %w", withoutPath(err))
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), partialPrefix) && !strings.HasPrefix(entry.Name(), packagePrefix) {
			continue
		}
		info, err := entry.Info()
		if err != nil || info.ModTime().After(since) {
			continue // another hub has deleted it, or can use it
		}
		if err := os.RemoveAll(filepath.Join(dir, entry.Name())); err != nil {
			return fmt.Errorf("delete a temporary file: %w", withoutPath(err))
		}
	}
	return nil
}

// touch sets the time of the last use of a file.
func (f *fileCache) touch(path string) {
	info, err := os.Stat(path)
	if now := time.Now(); err == nil && now.Sub(info.ModTime()) > touchInterval {
		_ = os.Chtimes(path, now, now) // otherwise the file is deleted earlier, and fetched again
	}
}

// add counts the file that the caller has created at path, and evicts files if all files exceed the limit.
func (f *fileCache) add(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("store a file: %w", withoutPath(err))
	}
	f.mu.Lock()
	f.used += fileSize(info)
	isFull := f.used > f.limit
	f.mu.Unlock()
	if !isFull {
		return nil
	}
	return f.evict()
}

// evict computes used. If it exceeds the limit, evict deletes the least recently used files until a tenth of the limit
// is free, so that the next files do not cause another eviction.
func (f *fileCache) evict() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return fmt.Errorf("list the cached files: %w", withoutPath(err))
	}
	var files []os.FileInfo
	f.used = 0
	for _, entry := range entries {
		if info, err := entry.Info(); err == nil && info.Mode().IsRegular() {
			files, f.used = append(files, info), f.used+fileSize(info)
		}
	}
	if f.used <= f.limit {
		return nil
	}
	slices.SortFunc(files, func(a, b os.FileInfo) int {
		return cmp.Or(a.ModTime().Compare(b.ModTime()), cmp.Compare(a.Name(), b.Name()))
	})
	for _, info := range files {
		if f.used <= f.limit-f.limit/10 {
			break
		}
		path := filepath.Join(f.dir, info.Name())
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("delete a cached file: %w", withoutPath(err))
		}
		f.used -= fileSize(info)
	}
	return nil
}

func fileSize(info os.FileInfo) int64 { return max(info.Size(), minFileSize) }
