package source

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/go-git/go-git/v5/plumbing"
	"github.com/go-git/go-git/v5/plumbing/filemode"
	"github.com/go-git/go-git/v5/plumbing/format/packfile"
	"github.com/go-git/go-git/v5/plumbing/object"
	"github.com/go-git/go-git/v5/storage/memory"

	"github.com/towline/towline/internal/archive"
)

const (
	// maxGitDepth limits the depth of directories, and of tags that point at tags.
	maxGitDepth = 100
	// maxGitTreeEntry is the size of an entry with the longest file name in a Git tree, in bytes.
	maxGitTreeEntry = 300
)

var errGitPack = errors.New("the Git server returned an invalid pack")

// filesInPack returns the files of a commit at or below directory, without symbolic links and submodules. hash is the
// commit or a tag of it. filesInPack calls reserve with the size of the unpacked objects before it unpacks them.
func filesInPack(pack []byte, hash plumbing.Hash, directory string, reserve func(int64) error) (map[string][]byte, error) {
	limits := archive.DefaultLimits()
	size, err := checkPack(pack, limits)
	if err == nil {
		err = reserve(size)
	}
	if err != nil {
		return nil, err
	}
	objects := memory.NewStorage()
	parser, err := packfile.NewParserWithStorage(packfile.NewScanner(bytes.NewReader(pack)), objects)
	if err != nil {
		return nil, errGitPack
	}
	if _, err := parser.Parse(); err != nil {
		return nil, errGitPack
	}
	// go-git decodes all entries of a tree before they can be counted. A decoded short entry takes four times its size.
	for _, tree := range objects.Trees {
		if tree.Size() > int64(limits.Files)*maxGitTreeEntry {
			return nil, fmt.Errorf("a directory of the Git repository has more than %d files", limits.Files)
		}
	}
	commit, err := findCommit(objects, hash)
	if err != nil {
		return nil, err
	}
	root, err := object.GetTree(objects, commit.TreeHash)
	if err == nil && directory != "" {
		if root, err = root.Tree(directory); errors.Is(err, object.ErrDirectoryNotFound) {
			return nil, fmt.Errorf("the directory %q %w", directory, ErrNotFound)
		}
	}
	if err != nil {
		return nil, errGitPack
	}
	walk := &gitWalk{objects: objects, limits: limits, blobs: map[plumbing.Hash][]byte{}, files: map[string][]byte{}}
	if err := walk.add(root, "", 0); err != nil {
		return nil, err
	}
	return walk.files, nil
}

// checkPack returns the size of the objects in a pack when they are unpacked, and an error if they exceed the limits.
func checkPack(pack []byte, limits archive.Limits) (int64, error) {
	scanner := packfile.NewScanner(bytes.NewReader(pack))
	_, count, err := scanner.Header()
	if err != nil {
		return 0, errGitPack
	}
	// Trees and commits are objects, too, so there are more objects than files.
	if int64(count) > int64(limits.Files)*4 {
		return 0, fmt.Errorf("the Git repository has more than %d objects", limits.Files*4)
	}
	var total int64
	for range count {
		header, err := scanner.NextObjectHeader()
		if err != nil {
			return 0, errGitPack
		}
		// The scanner returns an error if the object is larger than the length in its header.
		if total += header.Length; header.Length < 0 || total > limits.Size {
			return 0, gitSizeError(limits)
		}
		start := &prefixWriter{}
		if _, _, err := scanner.NextObject(start); err != nil {
			return 0, errGitPack
		}
		if !header.Type.IsDelta() {
			continue
		}
		size, ok := deltaTargetSize(start.prefix)
		if !ok {
			return 0, errGitPack
		}
		if total += size; size > limits.Size || total > limits.Size {
			return 0, gitSizeError(limits)
		}
	}
	return total, nil
}

func gitSizeError(limits archive.Limits) error {
	return fmt.Errorf("the Git repository has more than %d MiB", limits.Size>>20)
}

// prefixWriter keeps the first bytes: enough for the two sizes at the start of a delta.
type prefixWriter struct{ prefix []byte }

// Write implements io.Writer.
func (w *prefixWriter) Write(p []byte) (int, error) {
	const maxTwoSizes = 20
	w.prefix = append(w.prefix, p[:min(len(p), maxTwoSizes-len(w.prefix))]...)
	return len(p), nil
}

// deltaTargetSize returns the size of the object that a delta results in: the second number in the delta. It returns
// false if the delta is not valid.
func deltaTargetSize(delta []byte) (int64, bool) {
	var size int64
	for range 2 {
		size = 0
		for shift := 0; ; shift += 7 {
			if len(delta) == 0 || shift > 42 {
				return 0, false
			}
			size |= int64(delta[0]&0x7f) << shift
			isLast := delta[0] < 0x80
			delta = delta[1:]
			if isLast {
				break
			}
		}
	}
	return size, true
}

// findCommit returns the commit with a hash, or the commit that the tag with that hash points at.
func findCommit(objects *memory.Storage, hash plumbing.Hash) (*object.Commit, error) {
	for range maxGitDepth {
		tag, err := object.GetTag(objects, hash)
		if err != nil {
			break
		}
		hash = tag.Target
	}
	commit, err := object.GetCommit(objects, hash)
	if err != nil {
		return nil, fmt.Errorf("the commit %s %w", hash, ErrNotFound)
	}
	return commit, nil
}

// gitWalk collects the files of a tree. Each path counts in the limits, since one subtree can have many paths.
type gitWalk struct {
	objects *memory.Storage
	limits  archive.Limits
	entries int
	size    int64
	// blobs has the content of files that are read. Their objects are deleted, so that the content is in memory once.
	blobs map[plumbing.Hash][]byte
	files map[string][]byte
}

func (w *gitWalk) add(tree *object.Tree, directory string, depth int) error {
	if depth > maxGitDepth {
		return fmt.Errorf("its directories are more than %d levels deep", maxGitDepth)
	}
	for _, entry := range tree.Entries {
		if w.entries++; w.entries > w.limits.Files {
			return fmt.Errorf("it has more than %d files", w.limits.Files)
		}
		name, err := archive.CleanPath(path.Join(directory, entry.Name))
		if err != nil || strings.Contains(entry.Name, "/") {
			return errGitPack
		}
		switch entry.Mode {
		case filemode.Dir:
			below, err := object.GetTree(w.objects, entry.Hash)
			if err != nil {
				return errGitPack
			}
			if err := w.add(below, name, depth+1); err != nil {
				return err
			}
		case filemode.Regular, filemode.Deprecated, filemode.Executable:
			if err := w.addFile(name, entry.Hash); err != nil {
				return err
			}
		default: // symbolic links and submodules
		}
	}
	return nil
}

func (w *gitWalk) addFile(name string, hash plumbing.Hash) error {
	content, isRead := w.blobs[hash]
	if !isRead {
		var err error
		if content, err = w.readBlob(hash); err != nil {
			return err
		}
	}
	if w.size += int64(len(content)); w.size > w.limits.Size {
		return fmt.Errorf("its files have more than %d MiB", w.limits.Size>>20)
	}
	w.files[name] = content
	return nil
}

func (w *gitWalk) readBlob(hash plumbing.Hash) ([]byte, error) {
	blob, err := object.GetBlob(w.objects, hash)
	if err != nil {
		return nil, errGitPack
	}
	reader, err := blob.Reader()
	if err != nil {
		return nil, errGitPack
	}
	defer reader.Close()
	content, err := io.ReadAll(reader)
	if err != nil {
		return nil, errGitPack
	}
	delete(w.objects.Blobs, hash)
	delete(w.objects.Objects, hash)
	w.blobs[hash] = content
	return content, nil
}
