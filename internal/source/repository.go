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
	"net/url"
	"path"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/kube"
)

// indexEntrySize is the memory of an indexEntry in addition to its texts, in bytes.
const indexEntrySize = 128

// indexTTL is the time for which a cached index is used without a request.
const indexTTL = time.Minute

// maxChartURL limits the URL of a chart in an index, in bytes, since errors contain the URL. URLs with a signature have
// about 2 KiB.
const maxChartURL = 8 << 10

// index is a repository's index.yaml with the header fields for conditional requests, or the tags of a chart in a
// registry.
type index struct {
	Entries map[string][]*indexEntry `json:"entries"`
	tags    []string

	etag     string
	modified string
	checked  time.Time // the time of the last response with these entries or tags, or with Not Modified
	size     int       // estimated memory in bytes, rather too large
}

type indexEntry struct {
	Version string   `json:"version"`
	URLs    []string `json:"urls"`
	Digest  string   `json:"digest"`
}

// httpRepository is a chart repository with an index.yaml and archives, with the scheme http or https.
type httpRepository struct {
	charts *Charts
	url    string // ends in a slash
	login  Login
	client *http.Client
}

var _ repository = (*httpRepository)(nil)

func newHTTPRepository(charts *Charts, address string, login Login, transport http.RoundTripper) repository {
	return &httpRepository{
		charts: charts,
		url:    strings.TrimRight(address, "/") + "/",
		login:  login,
		client: &http.Client{Transport: transport, CheckRedirect: checkRedirect},
	}
}

func (r *httpRepository) locate(ctx context.Context, name, version string) (location, error) {
	listing, err := r.index(ctx, indexTTL)
	if err != nil {
		return location{}, err
	}
	entry, err := r.find(listing, name, version)
	if errors.Is(err, ErrNotFound) {
		// It may have been published after the index was cached.
		if listing, err = r.index(ctx, 0); err != nil {
			return location{}, err
		}
		entry, err = r.find(listing, name, version)
	}
	if err != nil {
		return location{}, err
	}
	if len(entry.URLs) == 0 {
		return location{}, errors.New("the repository's index has no URL for it")
	}
	if len(entry.URLs[0]) > maxChartURL {
		return location{}, fmt.Errorf("its URL in the repository's index has more than %d KiB", maxChartURL>>10)
	}
	base, err := url.Parse(r.url)
	if err != nil {
		return location{}, fmt.Errorf("parse the repository's URL: %w", err)
	}
	address, err := base.Parse(entry.URLs[0])
	if err != nil {
		return location{}, errors.New("its URL in the repository's index is not valid") // the error would have the URL
	}
	return location{
		version: entry.Version,
		url:     address.String(),
		digest:  strings.TrimPrefix(entry.Digest, "sha256:"),
		file:    path.Base(address.Path),
	}, nil
}

func (r *httpRepository) find(listing *index, name, version string) (*indexEntry, error) {
	var versions []string
	byVersion := map[string]*indexEntry{}
	for _, entry := range listing.Entries[name] {
		if entry != nil && len(entry.Version) <= maxFieldSize {
			versions = append(versions, entry.Version)
			byVersion[entry.Version] = entry
		}
	}
	chosen, err := chooseVersion(versions, version)
	if err != nil {
		return nil, err
	}
	return byVersion[chosen], nil
}

func (r *httpRepository) download(ctx context.Context, at location) ([]byte, error) {
	response, err := r.get(ctx, at.url, nil)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	archive, err := readAtMost(response.Body, maxArchive)
	if err != nil {
		return nil, fmt.Errorf("download %s: %w", redacted(at.url), err)
	}
	if sum := sha256.Sum256(archive); at.digest != "" && !strings.EqualFold(at.digest, hex.EncodeToString(sum[:])) {
		return nil, fmt.Errorf("download %s: its digest is not the one in the repository's index", redacted(at.url))
	}
	return archive, nil
}

// downloadProvenance returns the file <URL of the archive>.prov.
func (r *httpRepository) downloadProvenance(ctx context.Context, at location) ([]byte, error) {
	response, err := r.get(ctx, at.url+".prov", nil)
	if failed, ok := errors.AsType[*responseError](err); ok && failed.code == http.StatusNotFound {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	file, err := readAtMost(response.Body, maxProvenanceBytes)
	if err != nil {
		return nil, fmt.Errorf("download %s.prov: %w", redacted(at.url), err)
	}
	return file, nil
}

// index returns the repository's index. It sends no request if the cached index is younger than maxAge.
func (r *httpRepository) index(ctx context.Context, maxAge time.Duration) (*index, error) {
	key := "index " + r.url + " " + r.login.digest()
	known := r.charts.cachedIndex(key)
	if known != nil && r.charts.clock.Since(known.checked) < maxAge {
		return known, nil
	}
	shared, err, _ := r.charts.flights.Do(key, func() (any, error) {
		fresh, err := r.fetchIndex(ctx, known)
		if err == nil {
			r.charts.cacheIndex(key, fresh)
		}
		return fresh, err
	})
	if err != nil {
		return nil, err
	}
	return shared.(*index), nil
}

// fetchIndex requests the index. known is the cached index, which is not transferred again if it is unchanged, or nil.
func (r *httpRepository) fetchIndex(ctx context.Context, known *index) (*index, error) {
	header := http.Header{}
	if known != nil && known.etag != "" {
		header.Set("If-None-Match", known.etag)
	}
	if known != nil && known.modified != "" {
		header.Set("If-Modified-Since", known.modified)
	}
	response, err := r.get(ctx, r.url+"index.yaml", header)
	if failed, ok := errors.AsType[*responseError](err); ok {
		failed.isIndex = true
	}
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusNotModified && known != nil {
		same := *known
		same.checked = r.charts.clock.Now()
		return &same, nil
	}
	raw, err := readAtMost(response.Body, maxIndex)
	if err != nil {
		return nil, fmt.Errorf("read the repository's index.yaml: %w", err)
	}
	r.charts.parsing.Lock()
	fresh, err := parseIndex(raw)
	r.charts.parsing.Unlock()
	if err != nil {
		return nil, err
	}
	fresh.etag, fresh.modified = response.Header.Get("ETag"), response.Header.Get("Last-Modified")
	fresh.size = len(raw)
	for _, versions := range fresh.Entries {
		fresh.size += indexEntrySize * len(versions)
	}
	fresh.checked = r.charts.clock.Now()
	return fresh, nil
}

func parseIndex(raw []byte) (*index, error) {
	if kube.CountValuesParsingUpTo(raw, maxIndexNodes) > maxIndexNodes {
		return nil, fmt.Errorf("the repository's index.yaml has more than %d values", maxIndexNodes)
	}
	unmarshal := func(raw []byte, into any) error { return yaml.Unmarshal(raw, into) }
	if bytes.HasPrefix(bytes.TrimSpace(raw), []byte("{")) {
		unmarshal = json.Unmarshal // much faster for large indexes
	}
	parsed := &index{}
	if err := unmarshal(raw, parsed); err != nil {
		// The error would have parts of the response, which can be from an internal server that users must not read.
		return nil, errors.New("the repository's index.yaml is not valid YAML, or not an index of charts")
	}
	if parsed.Entries == nil {
		return nil, errors.New("the repository's index.yaml is not an index of charts")
	}
	return parsed, nil
}

// get sends a GET request. It returns the response if its status is OK or, for a conditional request, Not Modified, and
// fails with a responseError for any other status.
func (r *httpRepository) get(ctx context.Context, address string, header http.Header) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, fmt.Errorf("get %s: its URL is not valid", redacted(address))
	}
	for name := range header {
		request.Header.Set(name, header.Get(name))
	}
	request.Header.Set("User-Agent", "towline")
	if r.login.Username != "" && (r.login.PassCredentialsAll && r.login.isAllowed(request.URL) || r.isOwnHost(request.URL)) {
		request.SetBasicAuth(r.login.Username, r.login.Password)
	}
	response, err := r.client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("get %s: %w", redacted(address), stableError(err))
	}
	if response.StatusCode == http.StatusOK || response.StatusCode == http.StatusNotModified {
		return response, nil
	}
	response.Body.Close()
	return nil, fmt.Errorf("get %s: %w", redacted(address), statusTextError(response.StatusCode))
}

// responseError is a response with an unexpected status.
type responseError struct {
	code   int
	status string
	// isIndex is true if the request was for the index, which all charts of the repository need.
	isIndex bool
}

func (e *responseError) Error() string { return "the server returned " + e.status }

func (r *httpRepository) isOwnHost(address *url.URL) bool {
	own, err := url.Parse(r.url)
	return err == nil && own.Scheme == address.Scheme && own.Host == address.Host
}

// redacted returns address for messages, without the parts that can be credentials.
func redacted(address string) string {
	public, ok := withoutCredentials(address)
	if !ok {
		return "the repository"
	}
	return public.String()
}

// withoutCredentials returns a URL without its user, query and fragment. It returns false if address is not a URL, or
// has no host and may have a password in its path, such as "me:password@example.com".
func withoutCredentials(address string) (*url.URL, bool) {
	parsed, err := url.Parse(address)
	if err != nil || parsed.Host == "" && strings.Contains(parsed.Opaque+parsed.Path, "@") {
		return nil, false
	}
	parsed.User, parsed.RawQuery, parsed.ForceQuery, parsed.Fragment = nil, "", false, ""
	return parsed, true
}
