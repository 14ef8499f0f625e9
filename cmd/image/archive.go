package main

import (
	"archive/tar"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// writeArchive writes the files of a directory to a tar file, sorted by name. If it fails, it deletes the tar file.
func writeArchive(file, dir string) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil { //nolint:gosec // the image is no secret
		return err
	}
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	writer := tar.NewWriter(out)
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		return addFile(writer, filepath.ToSlash(name), path, 0o644)
	})
	if err = errors.Join(err, writer.Close(), out.Close()); err != nil {
		os.Remove(file)
	}
	return err
}
