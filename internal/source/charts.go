package source

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"

	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/tuf"
	"golang.org/x/sync/singleflight"
	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"k8s.io/utils/clock"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/phase"
)

// Chart is a chart archive on disk. It is never changed.
type Chart struct {
	// Path of the archive; its name is its digest.
	Path string `json:"-"`
	// Digest is the hex SHA-256 of the archive.
	Digest string `json:"digest"`
	// Name, Version, AppVersion and Icon are the fields of the archive's Chart.yaml. Icon is empty if it is large.
	Name       string `json:"name"`
	Version    string `json:"version"`
	AppVersion string `json:"appVersion,omitempty"`
	Icon       string `json:"icon,omitempty"`
	// Source is the Flux source of the chart, and Artifact its Artifact.Version. They are empty for any other chart.
	Source   Reference `json:"-"`
	Artifact string    `json:"-"`
}

// Charts fetches chart archives and caches them in a directory, which survives restarts. All clusters share the
// archives. Archives on disk and indexes in memory have a maximum total size; the least recently used ones are evicted.
// An exact version in the cache is never requested again, even if the repository replaces its archive. The cache key
// includes the login and the verification: an archive that was fetched with one login is not used for another one, and
// an archive is in the cache for a verification only after it has been verified.
type Charts struct {
	// Egress limits the connections to repositories. It must not be changed after the first fetch. Default: no limit.
	Egress *egress.Policy

	dir     string
	files   *fileCache
	clock   clock.PassiveClock
	flights singleflight.Group
	indexes *cache.Cache[*index]
	// cachedCharts has the entries of archives on disk, by chartRequest.key. The archive of an entry may have been
	// evicted.
	cachedCharts *cache.Cache[Chart]
	// limits bounds the memory of the responses of all fetches. parsing is held while an index is parsed or a chart is
	// loaded: both take much memory.
	limits  *fetchLimits
	parsing sync.Mutex

	mu       sync.Mutex // guards failures; no other lock is acquired while it is held
	failures map[string]failedRequest

	attempts *attempts[Chart]
	// publicRoot returns the trust root of Sigstore's public services.
	publicRoot func() (root.TrustedMaterial, error)
}

// NewCharts returns Charts that stores its archives in dir, and creates dir if it does not exist.
func NewCharts(dir string, clock clock.PassiveClock) (*Charts, error) {
	files, err := newFileCache(dir, maxChartDirSize)
	if err != nil {
		return nil, err
	}
	return &Charts{
		dir: dir, files: files, clock: clock, attempts: newAttempts[Chart](clock),
		cachedCharts: cache.New[Chart](maxCachedChartsSize), indexes: cache.New[*index](maxIndexesSize), failures: map[string]failedRequest{},
		limits:     newFetchLimits("the charts and indexes that are being fetched have", maxFetchedSize),
		publicRoot: publicRoot(filepath.Join(dir, "sigstore"), tuf.DefaultOptions()),
	}, nil
}

// repository is a chart repository. Its methods return when ctx ends.
type repository interface {
	// versions returns all versions of a chart, in any order, with or without a leading v. It fails with ErrNotFound if
	// there is no such chart.
	versions(ctx context.Context, name string) ([]string, error)
	// locate finds the newest version of a chart in version, which is an exact version or a range. It fails with
	// ErrNotFound if there is none.
	locate(ctx context.Context, name, version string) (location, error)
	// download returns the archive at a location that locate returned.
	download(ctx context.Context, at location) ([]byte, error)
	// downloadProvenance returns the provenance file of the archive. It fails with ErrNotFound if there is none.
	downloadProvenance(ctx context.Context, at location) ([]byte, error)
}

// location is the location of one version of a chart in its repository. url is the URL of the archive, or the name of
// the chart in an OCI registry. digest is the hex digest of the archive, "" if the index has none, or the digest of the
// OCI manifest, "sha256:<hex>". file is the file name of the archive.
type location struct {
	version string
	url     string
	digest  string
	file    string
}

// chartRequest is a chart to fetch. Artifacts uses it for artifacts, with the name of the source and the digest as
// version.
type chartRequest struct {
	repositoryURL string
	name          string
	version       string
	login         Login
	verification  Verification
}

// Fetch returns the archive of an expanded chart (see ExpandChart). Errors name the chart and the repository:
// ErrNotFound if the repository does not have the chart, phase.TerminalError if the profile or a Secret must be
// corrected, and any other error for a repository that cannot be reached or returns an invalid response, which the
// caller retries. ErrUnverified means that the chart has no valid signature that meets verification. It is cached for a
// minute, and ErrNotFound for 10 seconds.
//
// It returns a PendingError if the repository does not respond within 2 seconds, or within 100 milliseconds if another
// caller already waits for the repository. The error of a repository that cannot be reached is returned without a
// request during a pause that grows up to 5 minutes. A new spec, another URL and another login are tried at once.
// revision identifies the spec with the chart. It may be nil.
func (c *Charts) Fetch(
	ctx context.Context, chart configv1beta1.HelmChart, login Login, verification Verification, revision func() string,
) (Chart, error) {
	request := chartRequest{
		repositoryURL: chart.RepositoryURL,
		name:          nameInRepository(chart),
		version:       chart.ChartVersion,
		login:         login,
		verification:  verification,
	}
	open, err := openerFor(chart.RepositoryURL)
	if err != nil {
		return Chart{}, err
	}
	if isExact(request.version) {
		if cached, ok := c.cached(request); ok {
			return cached, nil
		}
	}
	fetched, err := c.attempts.fetch(ctx, request, revision, func(ctx context.Context) (Chart, error) { return c.fetch(ctx, request, open) })
	if err != nil {
		return Chart{}, fmt.Errorf("chart %s %s in %s: %w", chart.ChartName, chart.ChartVersion, redacted(chart.RepositoryURL), err)
	}
	return fetched, nil
}

// opener returns a client for the repository at an address. It sends no request.
type opener func(charts *Charts, address string, login Login, transport http.RoundTripper) repository

// openerFor returns the opener for the scheme of a URL. It returns an error for a URL without a host.
func openerFor(address string) (opener, error) {
	scheme, _, hasScheme := strings.Cut(address, "://")
	if _, err := registryHost(address); hasScheme && err != nil {
		return nil, phase.TerminalErrorf("repositoryURL %q has no valid host", redacted(address))
	}
	switch {
	case !hasScheme:
	case scheme == "http", scheme == "https":
		return newHTTPRepository, nil
	case scheme == "oci":
		return newOCIRegistry, nil
	}
	return nil, phase.TerminalErrorf("repositoryURL %q does not begin with http://, https:// or oci://", redacted(address))
}

// fetch finds, downloads, verifies and stores a chart. Charts.attempts calls it once for concurrent requests.
func (c *Charts) fetch(ctx context.Context, request chartRequest, open opener) (fetched Chart, err error) {
	if err := c.cachedFailure(request); err != nil {
		return Chart{}, err
	}
	ctx, transport, disconnect, err := c.connect(ctx, request.login)
	if err != nil {
		return Chart{}, err
	}
	defer disconnect()
	defer func() { err = cancelCause(ctx, err) }()
	repository := open(c, request.repositoryURL, request.login, transport)
	at, err := repository.locate(ctx, request.name, request.version)
	if errors.Is(err, ErrNotFound) {
		c.addFailure(request, err, missingTTL)
	}
	if err != nil {
		return Chart{}, err
	}
	exact := request
	exact.version = at.version
	if cached, ok := c.cached(exact); ok {
		return cached, nil
	}
	archive, err := repository.download(ctx, at)
	if err != nil {
		return Chart{}, &archiveError{err}
	}
	metadata, err := c.loadMetadata(archive)
	if err != nil {
		return Chart{}, fmt.Errorf("read the archive: %w", err)
	}
	got := downloadedChart{at: at, archive: archive, metadata: metadata}
	err = c.verify(ctx, repository, exact, got)
	if errors.Is(err, ErrUnverified) {
		c.addFailure(request, err, unverifiedTTL)
	}
	if err != nil {
		return Chart{}, err
	}
	return c.store(exact, got)
}

// loadMetadata loads an archive with Helm's loader and returns the metadata. It fails if the chart exceeds a limit.
func (c *Charts) loadMetadata(archive []byte) (*helmchart.Metadata, error) {
	c.parsing.Lock()
	defer c.parsing.Unlock()
	if err := newChartLimits().addArchive(archive, 0); err != nil {
		return nil, err
	}
	loaded, err := loader.LoadArchive(bytes.NewReader(archive))
	if err := checkLoaded(loaded, err); err != nil {
		return nil, err
	}
	return loaded.Metadata, nil
}

// repositoryKey identifies the repository and the login.
func (r chartRequest) repositoryKey() string {
	return Repository{URL: r.repositoryURL, Login: r.login}.Key()
}

// key is the cache key of a request. It ignores the leading v of the version.
func (r chartRequest) key() string {
	parts := []string{r.repositoryURL, r.name, strings.TrimPrefix(r.version, "v"), r.login.digest()}
	if !r.verification.isZero() {
		parts = append(parts, r.verification.digest())
	}
	raw, _ := json.Marshal(parts) // cannot fail for these types
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

func (c *Charts) cachedIndex(key string) *index {
	known, _ := c.indexes.Get(key)
	return known
}

func (c *Charts) cacheIndex(key string, fresh *index) { c.indexes.Put(key, fresh, fresh.size) }
