package source

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/tuf"
	"golang.org/x/sync/singleflight"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"k8s.io/utils/clock"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/phase"
)

// Chart is a chart archive on disk. It is never changed.
type Chart struct {
	// Path of the archive; its name is its digest.
	Path string `json:"-"`
	// Digest is the hex SHA-256 of the archive.
	Digest string `json:"digest"`
	// Name, Version, AppVersion and Icon are what the archive says of itself.
	Name       string `json:"name"`
	Version    string `json:"version"`
	AppVersion string `json:"appVersion,omitempty"`
	Icon       string `json:"icon,omitempty"`
}

// Charts fetches chart archives and keeps them in a directory, so that each is downloaded once: not once per cluster,
// nor again after a restart. An exact version that is kept is never asked for again, even if the repository changes
// what it has under that version. What one login was given is not given to another. A chart that must be verified is
// fetched apart from those that need not be, and is kept once it is verified: so it is verified once for each
// verification.
type Charts struct {
	dir     string
	clock   clock.PassiveClock
	flights singleflight.Group

	mu      sync.Mutex // guards what follows; nothing is taken inside it
	known   map[string]Chart
	indexes map[string]*index
	refused map[string]refusal

	// publicRoot returns the trust root of Sigstore's public services.
	publicRoot func() (root.TrustedMaterial, error)
}

// NewCharts returns Charts that keeps its archives in dir, which is made if it is missing.
func NewCharts(dir string, clock clock.PassiveClock) (*Charts, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the chart directory: %w", err)
	}
	return &Charts{
		dir: dir, clock: clock, known: map[string]Chart{}, indexes: map[string]*index{}, refused: map[string]refusal{},
		publicRoot: publicRoot(filepath.Join(dir, "sigstore"), tuf.DefaultOptions()),
	}, nil
}

// repository is one place that charts come from. All methods may take as long as ctx lets them.
type repository interface {
	// versions returns all versions of a chart, in any order and spelling. It fails with ErrNotFound if there is no
	// such chart.
	versions(ctx context.Context, name string) ([]string, error)
	// locate finds the newest chart that version, exact or a range, allows. It fails with ErrNotFound if there is none.
	locate(ctx context.Context, name, version string) (location, error)
	// download returns the archive at a location that locate returned.
	download(ctx context.Context, at location) ([]byte, error)
	// provenance returns the provenance file of that archive. It fails with ErrNotFound if there is none.
	provenance(ctx context.Context, at location) ([]byte, error)
}

// location says where in its repository one version of a chart is. Digest is empty if the repository does not tell.
// File is the name of the archive.
type location struct {
	version string
	url     string
	digest  string
	file    string
}

// order is one chart to fetch.
type order struct {
	repositoryURL string
	name          string
	version       string
	login         Login
	verification  Verification
}

// Fetch returns the archive of an expanded chart (see ExpandChart). Errors name the chart and the repository:
// ErrNotFound if the repository does not have it, phase.Invalid if only the user can cure it, and any other error for a
// repository that cannot be reached or does not answer as it should, which is worth another try. A chart that is not
// proven as verification demands is an error with ErrUnverified. It stays so for a minute, and then the repository is
// asked again.
func (c *Charts) Fetch(ctx context.Context, chart configv1beta1.HelmChart, login Login, verification Verification) (Chart, error) {
	wanted := order{
		repositoryURL: chart.RepositoryURL,
		name:          chartIn(chart),
		version:       chart.ChartVersion,
		login:         login,
		verification:  verification,
	}
	open, err := openerFor(chart.RepositoryURL)
	if err != nil {
		return Chart{}, err
	}
	if isExact(wanted.version) {
		if kept, ok := c.kept(wanted); ok {
			return kept, nil
		}
	}
	flight := c.flights.DoChan("chart "+wanted.key(), func() (any, error) {
		// Others may wait for the same chart: it must not matter to them that the first one gives up.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), fetchTimeout)
		defer cancel()
		return c.fetch(ctx, wanted, open)
	})
	select {
	case <-ctx.Done():
		return Chart{}, fmt.Errorf("fetch chart %s: %w", chart.ChartName, ctx.Err())
	case done := <-flight:
		if done.Err != nil {
			return Chart{}, fmt.Errorf("chart %s %s in %s: %w", chart.ChartName, chart.ChartVersion, redacted(chart.RepositoryURL), done.Err)
		}
		return done.Val.(Chart), nil
	}
}

type opener func(charts *Charts, address string, login Login, transport *http.Transport) repository

// openerFor chooses by the scheme of the URL.
func openerFor(address string) (opener, error) {
	scheme, _, _ := strings.Cut(address, "://")
	switch scheme {
	case "http", "https":
		return newHTTPRepository, nil
	case "oci":
		return newOCIRegistry, nil
	}
	return nil, phase.Invalidf("repositoryURL %q does not begin with http://, https:// or oci://", redacted(address))
}

func (c *Charts) fetch(ctx context.Context, wanted order, open opener) (Chart, error) {
	if err := c.refusal(wanted); err != nil {
		return Chart{}, err
	}
	transport, err := newTransport(wanted.login)
	if err != nil {
		return Chart{}, err
	}
	defer transport.CloseIdleConnections()
	repository := open(c, wanted.repositoryURL, wanted.login, transport)
	at, err := repository.locate(ctx, wanted.name, wanted.version)
	if err != nil {
		return Chart{}, err
	}
	found := wanted
	found.version = at.version
	if kept, ok := c.kept(found); ok {
		return kept, nil
	}
	archive, err := repository.download(ctx, at)
	if err != nil {
		return Chart{}, err
	}
	loaded, err := loader.LoadArchive(bytes.NewReader(archive))
	if err != nil {
		return Chart{}, fmt.Errorf("read the archive: %w", err)
	}
	got := download{at: at, archive: archive, metadata: loaded.Metadata}
	if err := c.verify(ctx, repository, found, got); err != nil {
		c.refuse(wanted, err)
		return Chart{}, err
	}
	return c.keep(found, got)
}

// key tells orders apart; the leading v of a version makes no difference.
func (o order) key() string {
	parts := []string{o.repositoryURL, o.name, strings.TrimPrefix(o.version, "v"), o.login.digest()}
	if !o.verification.isZero() {
		parts = append(parts, o.verification.digest())
	}
	raw, _ := json.Marshal(parts) // always has a JSON form
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

func (c *Charts) knownIndex(key string) *index {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.indexes[key]
}

func (c *Charts) keepIndex(key string, fresh *index) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.indexes[key] = fresh
}
