package source

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/egress"
)

const (
	// requestTimeout limits one request to a URL. remoteTimeout limits one fetch, which can need several requests.
	requestTimeout = 30 * time.Second
	remoteTimeout  = 2 * time.Minute
	// maxRedirects is the limit of the standard library.
	maxRedirects = 10
)

// remoteRevision identifies the content behind a URL for its server.
type remoteRevision struct {
	// ETag is the header field of the response. Last-Modified is not used: if an older file replaces a newer one, a server
	// can respond Not Modified.
	ETag string
	// Digest is the digest of an OCI manifest, or the hash of a Git commit.
	Digest string
}

// remoteResult is the result of one fetch. The keys of files are clean relative paths.
type remoteResult struct {
	files    map[string][]byte
	revision remoteRevision
	// isUnchanged is true if the content has the known revision. Then there are no files.
	isUnchanged bool
	// content has the files. Its size is reserved in share: the caller of fetch must keep the content or call free.
	content *Content
	share   *fetchShare
}

// free releases the memory that is reserved for the content, if there is any.
func (f remoteResult) free() {
	if f.content != nil {
		f.share.free(sizeOf(f.content))
	}
}

// remoteRequest is one fetch of a URL.
type remoteRequest struct {
	reference Reference
	login     remoteLogin
	// known is the revision of the last content, the zero revision if there is none.
	known    remoteRevision
	download *meteredDownload
	client   *http.Client
	egress   *egress.Policy
	timeout  time.Duration
}

// fetch fetches a URL once. The size of the returned content is reserved in share. Errors contain no credentials and no
// text of the server.
func (f *RemoteFetcher) fetch(ctx context.Context, share *fetchShare, ref Reference, login remoteLogin, known remoteRevision) (fetched remoteResult, err error) {
	ctx, cancel := context.WithTimeout(ctx, remoteTimeout)
	defer cancel()
	download := &meteredDownload{share: share, maxSize: maxRemoteDownload}
	ctx, release := f.limits.register(ctx, download)
	defer release() // runs after download.close, which frees the memory
	defer download.close()
	defer func() { err = cancelCause(ctx, err) }()
	transport, err := newTransport(login.Login, f.Egress)
	if err != nil {
		return remoteResult{}, err
	}
	defer transport.CloseIdleConnections()
	address, err := url.Parse(ref.URL)
	if err != nil {
		return remoteResult{}, errors.New("it is not a URL") // the reference was checked
	}
	request := remoteRequest{
		reference: ref, login: login, known: known, download: download,
		client:  &http.Client{Transport: transport, Timeout: f.timeout, CheckRedirect: checkRedirect},
		egress:  f.Egress,
		timeout: f.timeout,
	}
	fetch := request.fetchFile
	if address.Scheme == schemeOCI {
		fetch = request.fetchArtifact
	} else if isGit(address.Scheme) {
		fetch = request.fetchCommit
	}
	fetched, err = fetch(ctx, address)
	if errors.Is(err, errStatusNotFound) && (login.hasCredentials() || address.RawQuery != "" && !isGit(address.Scheme)) {
		return remoteResult{}, errMaybeUnauthorized
	}
	if err != nil || fetched.isUnchanged {
		return fetched, err
	}
	if len(fetched.files) == 0 {
		return remoteResult{}, errors.New("it has no files")
	}
	content := newContent(ref, fetched.files)
	content.Sensitive = login.hasCredentials()
	download.close() // from now on, the files count as content
	if err := share.reserve(sizeOf(&content), nil); err != nil {
		return remoteResult{}, err
	}
	return remoteResult{content: &content, share: share, revision: fetched.revision}, nil
}

var (
	// errStatusNotFound is ErrNotFound for the status Not Found, which can also mean a lack of access. Other errors that
	// are ErrNotFound have a proof, for example a list of branches without the branch in the URL.
	errStatusNotFound = fmt.Errorf("%w", ErrNotFound)
	// errMaybeUnauthorized replaces errStatusNotFound if the request had credentials, or parameters, which can be
	// credentials. It is not ErrNotFound: otherwise the objects of an optional URL would be deleted because a token has
	// expired.
	errMaybeUnauthorized = errors.New("404 Not Found, which is also the response of many servers to credentials that are not accepted")
)

// checkRedirect refuses redirects from https to http. It sends no credentials to another host, and no Referer to any
// host, since the parameters of a URL can be credentials.
func checkRedirect(next *http.Request, via []*http.Request) error {
	if len(via) >= maxRedirects {
		return fmt.Errorf("the server redirected more than %d times", maxRedirects)
	}
	if via[0].URL.Scheme == schemeHTTPS && next.URL.Scheme != schemeHTTPS {
		return errors.New("the server redirected from https to http, which is refused")
	}
	if next.URL.Scheme != schemeHTTPS && next.URL.Scheme != schemeHTTP {
		return errors.New("the server redirected to a URL with neither http nor https") // the error of http.Client has the scheme
	}
	next.Header.Del("Referer")
	for _, former := range append(via, next) {
		if !isSameOrigin(former.URL, via[0].URL) {
			next.Header.Del("Authorization")
		}
	}
	return nil
}

func isSameOrigin(a, b *url.URL) bool { return a.Scheme == b.Scheme && a.Host == b.Host }

// fetchFile fetches a file or an archive. The server does not send it again if it supports ETags and the file is
// unchanged.
func (r *remoteRequest) fetchFile(ctx context.Context, address *url.URL) (remoteResult, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), nil)
	if err != nil {
		return remoteResult{}, stableError(err)
	}
	r.login.authorize(request)
	if r.known.ETag != "" {
		request.Header.Set("If-None-Match", r.known.ETag)
	}
	response, err := r.do(request)
	if err != nil {
		return remoteResult{}, err
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusNotModified {
		return remoteResult{isUnchanged: true, revision: r.known}, nil
	}
	raw, err := r.download.readAll(response.Body)
	if err != nil {
		return remoteResult{}, err
	}
	if isEndUnknown(response) && !archive.IsArchive(raw) {
		return remoteResult{}, errors.New("the server does not send the length of its response, so a truncated response would not be noticed")
	}
	fetched := remoteResult{revision: remoteRevision{ETag: response.Header.Get("ETag")}}
	fetched.files, err = r.filesIn(ctx, raw, fileName(address))
	return fetched, err
}

// isEndUnknown returns whether the body ends with the connection. Then a truncated body seems to be complete, and the
// objects in the missing part would be deleted on the members.
func isEndUnknown(response *http.Response) bool {
	return response.ProtoMajor == 1 && response.ContentLength < 0 && len(response.TransferEncoding) == 0 && !response.Uncompressed
}

// do sends a request. It returns a response with the status OK or, for a conditional request, Not Modified. It fails
// with ErrNotFound for Not Found and Gone, and with a responseError for any other status.
func (r *remoteRequest) do(request *http.Request) (*http.Response, error) {
	request.Header.Set("User-Agent", "towline")
	response, err := r.client.Do(request)
	if err != nil {
		return nil, stableError(err)
	}
	isConditional := request.Header.Get("If-None-Match") != ""
	if response.StatusCode == http.StatusOK || response.StatusCode == http.StatusNotModified && isConditional {
		return response, nil
	}
	response.Body.Close()
	return nil, statusError(response.StatusCode)
}

// statusError returns the error for the status of a response, without text of the server.
func statusError(code int) error {
	if code == http.StatusNotFound || code == http.StatusGone {
		return errStatusNotFound
	}
	return statusTextError(code)
}

// statusTextError returns a responseError without the text of the server.
func statusTextError(code int) *responseError {
	return &responseError{code: code, status: strings.TrimSpace(fmt.Sprintf("%d %s", code, http.StatusText(code)))}
}

// filesIn returns the files of an archive, or else one file with the name and the data. It refuses HTML, which is a
// login page or an error with the status OK.
func (r *remoteRequest) filesIn(ctx context.Context, data []byte, name string) (map[string][]byte, error) {
	if archive.IsArchive(data) {
		return r.download.unpack(ctx, data)
	}
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, errors.New("the server returned no content") // to deploy nothing would delete everything
	}
	if http.DetectContentType(data) == "text/html; charset=utf-8" {
		return nil, errors.New("the server returned HTML, and not YAML or an archive")
	}
	return map[string][]byte{name: data}, nil
}
