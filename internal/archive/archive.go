// Package archive reads tar and zip archives of untrusted origin into memory, within limits.
//
// Read returns the regular files of an archive. An archive with a file outside of its root, a link or a device is
// refused as a whole, with an error that names the file.
//
// Start reading at Read.
package archive

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"strings"
)

// Limits bound the files of one archive.
type Limits struct {
	// Files is the maximum number of files, and Size the maximum sum of their sizes in bytes.
	Files int
	Size  int64
	// Reserve is called with the number of bytes that were unpacked, while they are unpacked. Its error ends Read. It may
	// be nil.
	Reserve func(n int64) error
}

// DefaultLimits are Helm's limit for the size of an unpacked chart, and more files than any known repository of
// manifests has.
func DefaultLimits() Limits { return Limits{Files: 50_000, Size: 100 << 20} }

// ErrFormat means that the data is not an archive.
var ErrFormat = errors.New("it is neither a tar nor a zip archive")

// The first bytes of the formats. The magic number of tar is at tarMagicPos in the first header.
const (
	gzipMagic   = "\x1f\x8b"
	zipMagic    = "PK\x03\x04"
	tarMagic    = "ustar"
	tarMagicPos = 257
)

// IsArchive returns whether Read knows the format of data.
func IsArchive(data []byte) bool {
	return hasPrefixAt(data, gzipMagic, 0) || hasPrefixAt(data, zipMagic, 0) || hasPrefixAt(data, tarMagic, tarMagicPos)
}

func hasPrefixAt(data []byte, magic string, position int) bool {
	return len(data) >= position && bytes.HasPrefix(data[position:], []byte(magic))
}

// Read returns the regular files of a tar, tar.gz or zip archive by their clean relative path, for example
// "base/kustomization.yaml". Of several files with the same path, it returns the last one. It returns an error that
// wraps ErrFormat for other data.
func Read(data []byte, limits Limits) (map[string][]byte, error) {
	files := &fileSet{limits: limits, byPath: map[string][]byte{}}
	var err error
	switch {
	case hasPrefixAt(data, gzipMagic, 0):
		var unpacked *gzip.Reader
		if unpacked, err = gzip.NewReader(bytes.NewReader(data)); err == nil {
			err = files.readTar(unpacked)
		}
	case hasPrefixAt(data, zipMagic, 0):
		err = files.readZip(data)
	case hasPrefixAt(data, tarMagic, tarMagicPos):
		err = files.readTar(bytes.NewReader(data))
	default:
		err = ErrFormat
	}
	if err != nil {
		return nil, fmt.Errorf("read archive: %w", err)
	}
	return files.byPath, nil
}

// fileSet collects the files of one archive.
type fileSet struct {
	limits Limits
	size   int64
	byPath map[string][]byte
}

func (s *fileSet) readTar(unpacked io.Reader) error {
	// Limits.Files does not count directories, and a header can have any number of records, so all headers have a limit,
	// too.
	headerBytes := int64(s.limits.Files) * tarEntryOverhead
	limited := &io.LimitedReader{R: unpacked}
	reader := tar.NewReader(limited)
	for {
		limited.N = headerBytes
		header, err := reader.Next()
		if headerBytes = limited.N; headerBytes == 0 {
			return fmt.Errorf("its headers have more than %d KiB", int64(s.limits.Files)*tarEntryOverhead>>10)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = checkName(header.Name)
		}
		if err != nil {
			return err
		}
		limited.N = math.MaxInt64 // add limits the data
		switch header.Typeflag {
		case tar.TypeDir, tar.TypeXGlobalHeader: // git archive writes a global header with the commit
			continue
		case tar.TypeReg:
			if err := s.add(header.Name, reader); err != nil {
				return err
			}
		default:
			return fmt.Errorf("%q is a link or a device, and only files and directories are allowed", header.Name)
		}
	}
}

const (
	// tarEntryOverhead is more than the size of the headers and the padding of most files in a tar archive: 512 bytes for
	// the header, 1 KiB for PAX records with their own header, and up to 511 bytes of padding. The rest is for
	// directories.
	tarEntryOverhead = 3 << 10
	// maxName is the maximum length of a path on Linux. It limits errors, which contain names.
	maxName = 4 << 10
	// zipEntryMagic is at the beginning of each entry in the directory of a zip archive.
	zipEntryMagic = "PK\x01\x02"
)

func checkName(name string) error {
	if len(name) > maxName {
		return fmt.Errorf("a file has a name of more than %d KiB", maxName>>10)
	}
	return nil
}

func (s *fileSet) readZip(data []byte) error {
	// The library decodes all entries at once, some hundred bytes each. Up to as many directories as files are allowed.
	if bytes.Count(data, []byte(zipEntryMagic)) > 2*s.limits.Files {
		return s.limits.filesError()
	}
	reader, err := zip.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		return err
	}
	for _, entry := range reader.File {
		if err := checkName(entry.Name); err != nil {
			return err
		}
		if entry.FileInfo().IsDir() {
			continue
		}
		if !entry.Mode().IsRegular() {
			return fmt.Errorf("%q is a link or a device, and only files and directories are allowed", entry.Name)
		}
		if err := s.addZipEntry(entry); err != nil {
			return err
		}
	}
	return nil
}

func (s *fileSet) addZipEntry(entry *zip.File) error {
	content, err := entry.Open()
	if err != nil {
		return fmt.Errorf("%q: %w", entry.Name, err)
	}
	defer content.Close()
	return s.add(entry.Name, content)
}

// add reads one file. It never reads more than one byte beyond the limit: sizes in headers can be wrong.
func (s *fileSet) add(name string, content io.Reader) error {
	clean, err := CleanPath(name)
	if err != nil {
		return err
	}
	if _, isKnown := s.byPath[clean]; !isKnown && len(s.byPath) >= s.limits.Files {
		return s.limits.filesError()
	}
	raw, err := io.ReadAll(&reservingReader{reader: io.LimitReader(content, s.limits.Size-s.size+1), reserve: s.limits.Reserve})
	if err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	if s.size += int64(len(raw)); s.size > s.limits.Size {
		return fmt.Errorf("%w (at %q)", s.limits.sizeError(), name)
	}
	s.byPath[clean] = raw
	return nil
}

func (l Limits) filesError() error { return fmt.Errorf("it has more than %d files", l.Files) }

func (l Limits) sizeError() error {
	return fmt.Errorf("its files have more than %d MiB", l.Size>>20)
}

// CleanPath returns the relative path of a file in a tree. It returns an error for an empty path, and for one that
// leaves the tree.
func CleanPath(name string) (string, error) {
	clean := path.Clean(strings.TrimPrefix(name, "./"))
	if strings.ContainsAny(name, "\x00\\") || path.IsAbs(clean) || clean == "." || clean == ".." || strings.HasPrefix(clean, "../") {
		return "", fmt.Errorf("%q is not a path below the root", name)
	}
	return clean, nil
}

// reservingReader reserves the bytes that are read. reserve may be nil.
type reservingReader struct {
	reader  io.Reader
	reserve func(n int64) error
}

// Read implements io.Reader.
func (r *reservingReader) Read(buffer []byte) (int, error) {
	n, err := r.reader.Read(buffer)
	if r.reserve != nil {
		if reserveErr := r.reserve(int64(n)); reserveErr != nil {
			return 0, reserveErr
		}
	}
	return n, err
}
