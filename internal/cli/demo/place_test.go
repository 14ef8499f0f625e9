package demo

import (
	"os"
	"path/filepath"
	"testing"
)

func TestOnlyDeadPlacesOfOursAreRemoved(t *testing.T) {
	t.Parallel()
	parent, elsewhere := t.TempDir(), t.TempDir()
	living, err := makePlace(parent)
	if err != nil {
		t.Fatal(err)
	}
	defer living.release()
	dead, err := makePlace(parent)
	if err != nil {
		t.Fatal(err)
	}
	dead.release()
	linked, err := makePlace(elsewhere)
	if err != nil {
		t.Fatal(err)
	}
	linked.release()
	link := filepath.Join(parent, placePrefix+"link")
	if err := os.Symlink(linked.dir, link); err != nil {
		t.Fatal(err)
	}
	if got := removeDead(parent); len(got) != 1 || got[0] != dead.dir {
		t.Errorf("removed %q, want only %s", got, dead.dir)
	}
	for _, kept := range []string{living.dir, linked.dir, link} {
		if _, err := os.Stat(kept); err != nil {
			t.Errorf("%s is gone: %v", kept, err)
		}
	}
}
