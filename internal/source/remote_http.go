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
	// requestTimeout limits one request of a remote source, and remoteTimeout one fetch.
	requestTimeout = 30 * time.Second
	remoteTimeout  = 2 * time.Minute
	// maxRedirects is the limit of the standard library.
	maxRedirects = 10
)

// remoteRevision identifies the content behind a URL on its server.
type remoteRevision struct {
	// ETag is the header field of a response. Last-Modified is of no use: a server can answer that an older file, which
	// replaced a newer one, is not modified.
	ETag string
	// Digest is the digest of an OCI manifest, or the hash of a Git commit.
	Digest string
}

// remoteFetch is the result of one fetch. files are by their clean relative path.
type remoteFetch struct {
	files    map[string][]byte
	revision remoteRevision
	// isUnchanged is true, and there are no files, if the content has the known revision.
	isUnchanged bool
	// content has the files. Its size is reserved in share: the caller of fetch must call free, or keep the content.
	content *Content
	share   *fetchShare
}

// free releases the memory that is reserved for the content, if there is any.
func (f remoteFetch) free() {
	if f.content != nil {
		f.share.free(sizeOf(f.content))
	}
}

// remoteRequest is one fetch of a URL.
type remoteRequest struct {
	reference Reference
	login     remoteLogin
	// known is the revision of the content that is already there, the zero revision if there is none.
	known    remoteRevision
	download *remoteDownload
	client   *http.Client
	egress   *egress.Policy
	timeout  time.Duration
}

// fetch fetches a URL. It returns the files as content, whose size is reserved in share. Errors contain no credentials
// and no text that the server sent.
func (f *RemoteFetcher) fetch(ctx context.Context, share *fetchShare, ref Reference, login remoteLogin, known remoteRevision) (fetched remoteFetch, err error) {
	ctx, cancel := context.WithTimeout(ctx, remoteTimeout)
	defer cancel()
	download := &remoteDownload{share: share, maxSize: maxRemoteDownload}
	ctx, release := f.limits.cancelable(ctx, download)
	defer release() // runs after download.close, which frees the memory
	defer download.close()
	defer func() { err = fetchError(ctx, err) }()
	transport, err := newTransport(login.Login, f.Egress)
	if err != nil {
		return remoteFetch{}, err
	}
	defer transport.CloseIdleConnections()
	address, err := url.Parse(ref.URL)
	if err != nil {
		return remoteFetch{}, errors.New("it is not a URL") // the reference was checked
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
		return remoteFetch{}, errHidden
	}
	if err != nil || fetched.isUnchanged {
		return fetched, err
	}
	if len(fetched.files) == 0 {
		return remoteFetch{}, errors.New("it has no files")
	}
	content := newContent(ref, fetched.files)
	content.Sensitive = login.hasCredentials()
	download.close() // from now on, the files count as content
	if err := share.reserve(sizeOf(&content), nil); err != nil {
		return remoteFetch{}, err
	}
	return remoteFetch{content: &content, share: share, revision: fetched.revision}, nil
}

var (
	// errStatusNotFound is the error of the status Not Found. Other errors that are ErrNotFound are proved by what the
	// server sent, for example a list of branches without the one in the URL.
	errStatusNotFound = fmt.Errorf("%w", ErrNotFound)
	// errHidden replaces errStatusNotFound if the request had credentials, or parameters, which can be credentials. It is
	// not ErrNotFound: an optional URL would count as missing, and what was delivered would be deleted, because a token
	// has expired.
	errHidden = errors.New("404 Not Found, which is also the response of many servers to credentials that are not accepted")
)

// checkRedirect refuses redirects from https to http. A redirect to another host gets neither credentials nor the URL
// of the request before it, which can have credentials as parameters.
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

// fetchFile fetches a file or an archive. An unchanged one is not transferred again if the server supports it.
func (r *remoteRequest) fetchFile(ctx context.Context, address *url.URL) (remoteFetch, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), nil)
	if err != nil {
		return remoteFetch{}, stableError(err)
	}
	r.login.authorize(request)
	if r.known.ETag != "" {
		request.Header.Set("If-None-Match", r.known.ETag)
	}
	response, err := r.do(request)
	if err != nil {
		return remoteFetch{}, err
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusNotModified {
		return remoteFetch{isUnchanged: true, revision: r.known}, nil
	}
	raw, err := r.download.readAll(response.Body)
	if err != nil {
		return remoteFetch{}, err
	}
	if isEndUnknown(response) && !archive.IsArchive(raw) {
		return remoteFetch{}, errors.New("the server does not send the length of its response, so a part of it cannot be told from the whole")
	}
	fetched := remoteFetch{revision: remoteRevision{ETag: response.Header.Get("ETag")}}
	fetched.files, err = r.filesIn(ctx, raw, fileName(address))
	return fetched, err
}

// isEndUnknown returns whether the end of the connection is the end of the body, so that a body that is cut off seems
// to be complete. What is missing in it would be deleted on the members.
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

// statusError returns the error for the status of a response. It has no text of the server.
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

// filesIn returns the files of an archive, or data as a file with name. HTML is refused: it is a login page, or an
// error with the status OK.
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
