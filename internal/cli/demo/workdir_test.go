package demo

import (
	"os"
	"path/filepath"
	"testing"
)

func TestOnlyStaleWorkDirsOfThisUserAreDeleted(t *testing.T) {
	t.Parallel()
	parent, elsewhere := t.TempDir(), t.TempDir()
	inUse, err := createWorkDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	defer inUse.unlock()
	stale, err := createWorkDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	stale.unlock()
	linked, err := createWorkDir(elsewhere)
	if err != nil {
		t.Fatal(err)
	}
	linked.unlock()
	link := filepath.Join(parent, workDirPrefix+"link")
	if err := os.Symlink(linked.path, link); err != nil {
		t.Fatal(err)
	}
	if got := deleteStaleWorkDirs(parent); len(got) != 1 || got[0] != stale.path {
		t.Errorf("deleted %q, want only %s", got, stale.path)
	}
	for _, path := range []string{inUse.path, linked.path, link} {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("%s is deleted: %v", path, err)
		}
	}
}
