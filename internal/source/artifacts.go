package source

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/phase"
)

const (
	// maxTreesSize and maxSelectedSize limit Artifacts.trees and Artifacts.selected, in bytes.
	maxTreesSize    = 64 << 20
	maxSelectedSize = 32 << 20
)

// Artifacts reads the content of Flux's sources. It downloads an artifact once for all members and profiles, and keeps
// the last artifact of each source in a directory. The directory survives restarts and has a maximum size. Artifacts is
// safe for concurrent use.
type Artifacts struct {
	// Objects returns a source from the hub's cache. It fails with the API error NotFound if the object does not exist,
	// and with NewPendingFluxError before the cache has synced. A kind without a CRD is another error, so that optional
	// sources are not taken for missing.
	Objects func(ctx context.Context, ref Reference) (*unstructured.Unstructured, error)
	// Egress limits the connections to the servers of artifacts. Default: no limit.
	Egress *egress.Policy

	dir      string
	archives *fileCache
	attempts *attempts[Content]
	// trees caches all files of an artifact by its digest. selected caches the manifests of a directory in an artifact, so
	// that a tree that is evicted is not unpacked again for them.
	trees, selected *cache.Cache[Content]
	// unpacking is held while an artifact is unpacked: then it is in memory twice.
	unpacking sync.Mutex
}

// NewArtifacts returns Artifacts that stores the archives in dir, and creates dir if it does not exist. The caller must
// set Objects.
func NewArtifacts(dir string, clock clock.PassiveClock) (*Artifacts, error) {
	archives, err := newFileCache(dir, maxArtifactDirSize)
	if err != nil {
		return nil, err
	}
	return &Artifacts{
		dir: dir, archives: archives, attempts: newAttempts[Content](clock), trees: cache.New[Content](maxTreesSize), selected: cache.New[Content](maxSelectedSize),
	}, nil
}

// fetchTree returns the files of an artifact, without Content.Reference. Like Charts.Fetch, it returns a PendingError
// for a slow server, and the last error for a growing time. A new digest is downloaded at once.
func (a *Artifacts) fetchTree(ctx context.Context, ref Reference, artifact Artifact) (Content, error) {
	if known, ok := a.trees.Get(artifact.Digest); ok {
		return known, nil
	}
	address, err := url.Parse(artifact.URL)
	if err != nil || address.Host == "" || address.Scheme != "http" && address.Scheme != "https" {
		return Content{}, errors.New("its URL is not a URL with http or https")
	}
	// source-controller has a directory for each source. As the repository's URL, it separates the failures of the
	// sources.
	request := chartRequest{repositoryURL: address.JoinPath("..").String(), name: ref.String(), version: artifact.Digest}
	revision := func() string { return artifact.Digest + " " + artifact.URL }
	return a.attempts.fetch(ctx, request, revision, func(ctx context.Context) (Content, error) { return a.downloadAndUnpack(ctx, ref, artifact) })
}

// downloadAndUnpack downloads an artifact, unless its archive is in a.dir, and unpacks it.
func (a *Artifacts) downloadAndUnpack(ctx context.Context, ref Reference, artifact Artifact) (Content, error) {
	name := sha256.Sum256([]byte(ref.String()))
	path := filepath.Join(a.dir, hex.EncodeToString(name[:]))
	if verifyArchive(path, artifact.Digest) != nil {
		if err := a.download(ctx, artifact, path); err != nil {
			return Content{}, err
		}
	}
	a.archives.touch(path)
	a.unpacking.Lock()
	defer a.unpacking.Unlock()
	raw, err := os.ReadFile(path)
	if err == nil {
		err = verifyDigest(bytes.NewReader(raw), artifact.Digest) // a concurrent download of another revision can have replaced it
	}
	if err != nil {
		return Content{}, err
	}
	files, err := archive.Read(raw, archive.DefaultLimits())
	if err != nil {
		return Content{}, err
	}
	content := newContent(Reference{}, files)
	return a.trees.GetOrPut(artifact.Digest, content, int(sizeOf(&content))), nil
}

// download verifies the digest of an archive and stores it at path. It follows no redirects: source-controller sends
// none.
func (a *Artifacts) download(ctx context.Context, artifact Artifact, path string) error {
	transport, err := newTransport(Login{}, a.Egress)
	if err != nil {
		return err
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, artifact.URL, nil)
	if err != nil {
		return stableError(err)
	}
	request.Header.Set("User-Agent", "towline")
	response, err := client.Do(request)
	if err != nil {
		return stableError(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return statusTextError(response.StatusCode)
	}
	file, err := os.CreateTemp(a.dir, partialPrefix)
	if err != nil {
		return withoutPath(err)
	}
	defer os.Remove(file.Name()) // already renamed, unless something failed
	size, err := io.Copy(file, io.LimitReader(response.Body, maxArchive+1))
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return stableError(withoutPath(err))
	}
	if size > maxArchive {
		return fmt.Errorf("it has more than %d MiB", maxArchive>>20)
	}
	if err := verifyArchive(file.Name(), artifact.Digest); err != nil {
		return err
	}
	if err := os.Rename(file.Name(), path); err != nil {
		return err
	}
	return a.archives.add(path)
}

// withoutPath returns an error of a file without its path, which differs between attempts.
func withoutPath(err error) error {
	if failed, ok := errors.AsType[*fs.PathError](err); ok {
		return fmt.Errorf("%s a file: %w", failed.Op, failed.Err)
	}
	return err
}

// verifyArchive returns an error unless the file has the digest.
func verifyArchive(path, digest string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // it was only read
	return verifyDigest(file, digest)
}

// verifyDigest returns an error unless an archive has the digest.
func verifyDigest(archive io.Reader, digest string) error {
	algorithm, want, _ := strings.Cut(digest, ":")
	var sum hash.Hash
	switch algorithm {
	case "sha256":
		sum = sha256.New()
	case "sha384":
		sum = sha512.New384()
	case "sha512":
		sum = sha512.New()
	default:
		return phase.TerminalErrorf("its digest %q is not of sha256, sha384 or sha512", digest)
	}
	if _, err := io.Copy(sum, archive); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return fmt.Errorf("its digest is %s:%s, and the source says %s", algorithm, got, digest)
	}
	return nil
}
