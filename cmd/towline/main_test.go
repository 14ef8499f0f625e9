package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestIsClosed(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		path string
		flag int
		want bool
	}{
		"closed":    {os.DevNull, os.O_RDWR, true}, // as the Go runtime opens it
		"discarded": {os.DevNull, os.O_WRONLY, false},
		"a file":    {filepath.Join(t.TempDir(), "out"), os.O_RDWR | os.O_CREATE, false},
	} {
		out, err := os.OpenFile(test.path, test.flag, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if got := isClosed(out); got != test.want {
			t.Errorf("%s: got %t, want %t", name, got, test.want)
		}
		if err := out.Close(); err != nil {
			t.Error(err)
		}
	}
}
