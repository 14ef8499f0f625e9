package localkube

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// BinaryDirVariable is the environment variable that names a directory in which Binary looks.
const BinaryDirVariable = "TOWLINE_BIN"

// modulePath is the first line of the go.mod beside whose bin directory `make build` leaves its results.
const modulePath = "module github.com/towline/towline\n"

// Binary returns the absolute path of a program that `make build` builds: towline, localkube, kubectl or helm. It looks beside the
// running executable, in the directory that TOWLINE_BIN names, in bin/ of the module around the working directory, and on PATH.
func Binary(name string) (string, error) {
	for _, dir := range binaryDirs() {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return filepath.Abs(path)
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("find %s: run `make build` first, or name its directory in %s: %w", name, BinaryDirVariable, err)
	}
	return filepath.Abs(path)
}

func binaryDirs() []string {
	var dirs []string
	if self, err := os.Executable(); err == nil {
		dirs = append(dirs, filepath.Dir(self))
	}
	if dir := os.Getenv(BinaryDirVariable); dir != "" {
		dirs = append(dirs, dir)
	}
	if root, err := moduleRoot(); err == nil {
		dirs = append(dirs, filepath.Join(root, "bin"))
	}
	return dirs
}

// moduleRoot walks up from the working directory to the directory with our go.mod.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.Contains(text, []byte(modulePath)) {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("not inside the module")
		}
		dir = parent
	}
}
