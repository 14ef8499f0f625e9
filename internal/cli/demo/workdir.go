package demo

import (
	"os"
	"path/filepath"
	"syscall"
)

const (
	// workDirPrefix is the prefix of the names of the directories of demos.
	workDirPrefix = "towline-demo-"
	// lockName is the name of a file that a running demo keeps locked in its directory. The kernel unlocks it when the
	// process ends.
	lockName = "lock"
)

// workDir is the directory with all files of one demo.
type workDir struct {
	path string
	lock *os.File
}

func createWorkDir(parent string) (workDir, error) {
	path, err := os.MkdirTemp(parent, workDirPrefix)
	if err != nil {
		return workDir{}, err
	}
	// The lock file gets its name after it is locked: otherwise a second demo could delete the directory of this one.
	unnamed := filepath.Join(path, lockName+".new")
	lock, err := openLocked(unnamed, os.O_CREATE|os.O_RDWR)
	if err != nil {
		return workDir{}, err
	}
	if err := os.Rename(unnamed, filepath.Join(path, lockName)); err != nil {
		return workDir{}, err
	}
	return workDir{path: path, lock: lock}, nil
}

// unlock unlocks the directory. The caller must have deleted the directory before.
func (w workDir) unlock() { _ = w.lock.Close() }

// openLocked opens a file and locks it. A file that another process has locked is an error.
func openLocked(path string, flags int) (*os.File, error) {
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

// deleteStaleWorkDirs deletes the directories of demos that were killed, and returns their paths. It skips directories
// without a lock file: another demo may be creating the lock file.
func deleteStaleWorkDirs(parent string) []string {
	var deleted []string
	locks, err := filepath.Glob(filepath.Join(parent, workDirPrefix+"*", lockName))
	if err != nil {
		return nil
	}
	for _, path := range locks {
		dir := filepath.Dir(path)
		if !isOwnedDir(dir) {
			continue
		}
		lock, err := openLocked(path, os.O_RDWR|syscall.O_NOFOLLOW)
		if err != nil {
			continue
		}
		if deleteWorkDir(dir) == nil {
			deleted = append(deleted, dir)
		}
		_ = lock.Close()
	}
	return deleted
}

// isOwnedDir reports whether path is a directory of this user. In a directory that all users can write, path may be a
// link to another directory.
func isOwnedDir(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || !info.IsDir() {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == os.Geteuid()
}

// deleteWorkDir deletes a directory. It deletes the lock file last, so that the next demo retries after a failure.
func deleteWorkDir(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Name() == lockName {
			continue
		}
		if err := os.RemoveAll(filepath.Join(path, entry.Name())); err != nil {
			return err
		}
	}
	return os.RemoveAll(path)
}
