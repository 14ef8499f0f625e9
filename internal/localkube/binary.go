package localkube

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// BinaryDirVariable is the environment variable with a directory that Binary searches.
const BinaryDirVariable = "TOWLINE_BIN"

// moduleLine is a line in this module's go.mod. `make build` writes to the directory bin beside the file.
const moduleLine = "module github.com/towline/towline\n"

// Binary returns the absolute path of a program that `make build` builds: towline, towline-agent, localkube, kubectl or
// helm. It searches the directory of the running executable, the directory in TOWLINE_BIN, the directory bin of the
// module that contains the working directory, and PATH.
func Binary(name string) (string, error) {
	for _, dir := range binaryDirs() {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return filepath.Abs(path)
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("find %s: run `make build` first, or set %s to its directory: %w", name, BinaryDirVariable, err)
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

// moduleRoot returns the working directory or its closest parent that has this module's go.mod.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.Contains(text, []byte(moduleLine)) {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("not inside the module")
		}
		dir = parent
	}
}
