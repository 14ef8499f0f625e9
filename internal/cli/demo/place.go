package demo

import (
	"os"
	"path/filepath"
	"syscall"
)

const (
	// placePrefix begins the names of the demos' directories.
	placePrefix = "towline-demo-"
	// lockName is the file that a demo keeps locked in its directory while it lives. The kernel unlocks it, however
	// the demo ends.
	lockName = "lock"
)

// place is the directory that holds everything of one demo.
type place struct {
	dir  string
	lock *os.File
}

func makePlace(parent string) (place, error) {
	dir, err := os.MkdirTemp(parent, placePrefix)
	if err != nil {
		return place{}, err
	}
	// The lock appears under its name only once it is held: a demo that starts now must not take this one for dead.
	fresh := filepath.Join(dir, lockName+".new")
	lock, err := locked(fresh, os.O_CREATE|os.O_RDWR)
	if err != nil {
		return place{}, err
	}
	if err := os.Rename(fresh, filepath.Join(dir, lockName)); err != nil {
		return place{}, err
	}
	return place{dir: dir, lock: lock}, nil
}

// release unlocks the directory, which is gone by then.
func (p place) release() { _ = p.lock.Close() }

// locked opens a file and locks it. It is an error if someone has it locked.
func locked(path string, flags int) (*os.File, error) {
	file, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

// removeDead removes what demos left that were killed and could not clean up, and returns their directories. One
// without a lock is left alone: its demo may be about to make it.
func removeDead(parent string) []string {
	var removed []string
	locks, err := filepath.Glob(filepath.Join(parent, placePrefix+"*", lockName))
	if err != nil {
		return nil
	}
	for _, path := range locks {
		dir := filepath.Dir(path)
		if !ours(dir) {
			continue
		}
		lock, err := locked(path, os.O_RDWR|syscall.O_NOFOLLOW)
		if err != nil {
			continue
		}
		if removePlace(dir) == nil {
			removed = append(removed, dir)
		}
		_ = lock.Close()
	}
	return removed
}

// ours says whether dir is a directory that this user made. In a directory that everybody may write to it could be a
// link to another one.
func ours(dir string) bool {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == os.Geteuid()
}

// removePlace removes a directory, its lock last: what cannot be removed now, the next demo tries again.
func removePlace(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Name() == lockName {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return os.RemoveAll(dir)
}
