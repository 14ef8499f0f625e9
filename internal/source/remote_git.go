package source

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/go-git/go-git/v5/plumbing"
	"github.com/go-git/go-git/v5/plumbing/format/pktline"
	"github.com/go-git/go-git/v5/plumbing/protocol/packp"
	"github.com/go-git/go-git/v5/plumbing/protocol/packp/capability"
	"github.com/go-git/go-git/v5/plumbing/protocol/packp/sideband"
)

// gitConnection is a connection to the service git-upload-pack of one repository.
type gitConnection interface {
	// advertisement returns the server's list of references. It is called once.
	advertisement(ctx context.Context) (io.ReadCloser, error)
	// request sends a request and returns the response. It is called once, after advertisement.
	request(ctx context.Context, body []byte) (io.ReadCloser, error)
	close()
}

// errGitResponse replaces errors of the protocol, which can contain text of the server.
var errGitResponse = errors.New("the Git server refused the request or returned an invalid response")

// fetchCommit fetches the files of one commit of a Git repository, without its history, if its hash has changed.
func (r *remoteRequest) fetchCommit(ctx context.Context, parsed *url.URL) (remoteResult, error) {
	address, err := parseGitAddress(parsed.String())
	if err != nil {
		return remoteResult{}, err
	}
	if r.known.Digest != "" && r.known.Digest == address.ref {
		return remoteResult{isUnchanged: true, revision: r.known}, nil // a commit never changes
	}
	connection, err := r.connectGit(ctx, address)
	if err != nil {
		return remoteResult{}, err
	}
	defer connection.close()
	advertised, err := readAdvertisement(ctx, connection)
	if err != nil {
		return remoteResult{}, err
	}
	hash, isAdvertised, err := findGitReference(advertised, address.ref)
	if err != nil {
		return remoteResult{}, err
	}
	fetched := remoteResult{revision: remoteRevision{Digest: hash.String()}}
	if fetched.revision == r.known {
		fetched.isUnchanged = true
		return fetched, nil
	}
	pack, err := r.fetchPack(ctx, connection, advertised, hash, isAdvertised)
	if err != nil {
		return remoteResult{}, err
	}
	end, err := r.download.startUnpacking(ctx)
	if err != nil {
		return remoteResult{}, err
	}
	defer end()
	fetched.files, err = filesInPack(pack, hash, address.directory, r.download.addUnpacked)
	return fetched, err
}

func (r *remoteRequest) connectGit(ctx context.Context, address gitAddress) (gitConnection, error) {
	if address.url.Scheme == "ssh" {
		return r.dialGit(ctx, address.url)
	}
	return &gitHTTP{remoteRequest: r, repository: address.url}, nil
}

func readAdvertisement(ctx context.Context, connection gitConnection) (*packp.AdvRefs, error) {
	body, err := connection.advertisement(ctx)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	advertised := packp.NewAdvRefs()
	if err := advertised.Decode(body); err != nil {
		if errors.Is(err, packp.ErrEmptyAdvRefs) {
			return advertised, nil
		}
		return nil, gitError(err)
	}
	return advertised, nil
}

// gitError returns an error of the network or of a limit, and errGitResponse for all others.
func gitError(err error) error {
	if _, ok := errors.AsType[*sizeError](err); ok {
		return err
	}
	if stable := stableError(err); isNetworkError(err) {
		return stable
	}
	return errGitResponse
}

// findGitReference returns the hash of ref, see gitAddress.ref, and whether the server advertises it. It fails with
// ErrNotFound for a missing branch or tag.
func findGitReference(advertised *packp.AdvRefs, ref string) (hash plumbing.Hash, isAdvertised bool, err error) {
	if ref == "" {
		if advertised.Head == nil {
			return hash, false, fmt.Errorf("the default branch %w", ErrNotFound)
		}
		return *advertised.Head, true, nil
	}
	for _, name := range []string{ref, "refs/heads/" + ref, "refs/tags/" + ref} {
		if found, ok := advertised.References[name]; ok && strings.HasPrefix(name, "refs/") {
			return found, true, nil
		}
	}
	if !plumbing.IsHash(ref) {
		return hash, false, fmt.Errorf("the branch or tag %q %w", ref, ErrNotFound)
	}
	hash = plumbing.NewHash(ref)
	return hash, slices.Contains(slices.Collect(maps.Values(advertised.References)), hash), nil
}

// fetchPack returns a pack with the commit. Many servers send only commits that they advertise. If such a server does
// not advertise the commit, fetchPack fetches the history of all branches and tags.
func (r *remoteRequest) fetchPack(
	ctx context.Context, connection gitConnection, advertised *packp.AdvRefs, hash plumbing.Hash, isAdvertised bool,
) ([]byte, error) {
	request := packp.NewUploadPackRequest()
	capabilities := capability.NewList()
	for _, name := range []capability.Capability{capability.Sideband64k, capability.OFSDelta, capability.NoProgress, capability.Shallow} {
		if advertised.Capabilities.Supports(name) {
			if err := capabilities.Set(name); err != nil {
				return nil, errGitResponse
			}
		}
	}
	request.Capabilities, request.Wants = capabilities, []plumbing.Hash{hash}
	if !isAdvertised && !advertised.Capabilities.Supports(capability.AllowReachableSHA1InWant) {
		request.Wants = nil
		for name, tip := range advertised.References {
			if strings.HasPrefix(name, "refs/heads/") || strings.HasPrefix(name, "refs/tags/") {
				request.Wants = append(request.Wants, tip)
			}
		}
	} else if capabilities.Supports(capability.Shallow) {
		request.Depth = packp.DepthCommits(1)
	}
	if len(request.Wants) == 0 {
		return nil, fmt.Errorf("the commit %s %w", hash, ErrNotFound)
	}
	return r.readPack(ctx, connection, request)
}

func (r *remoteRequest) readPack(ctx context.Context, connection gitConnection, request *packp.UploadPackRequest) ([]byte, error) {
	var body bytes.Buffer
	err := request.UploadRequest.Encode(&body)
	if err == nil {
		err = pktline.NewEncoder(&body).EncodeString("done\n")
	}
	if err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	response, err := connection.request(ctx, body.Bytes())
	if err != nil {
		return nil, err
	}
	defer response.Close()
	decoded := packp.NewUploadPackResponse(request)
	if err := decoded.Decode(response); err != nil {
		return nil, gitError(err)
	}
	var pack io.Reader = decoded
	if request.Capabilities.Supports(capability.Sideband64k) {
		pack = sideband.NewDemuxer(sideband.Sideband64k, decoded)
	}
	raw, err := io.ReadAll(pack)
	if err != nil {
		return nil, gitError(err)
	}
	return raw, nil
}

// gitHTTP is a connection over HTTP.
type gitHTTP struct {
	*remoteRequest

	// repository is the URL of the repository. advertisement replaces it after a redirect.
	repository *url.URL
}

const (
	gitService       = "git-upload-pack"
	gitReferencePath = "/info/refs"
)

func (g *gitHTTP) advertisement(ctx context.Context) (io.ReadCloser, error) {
	address := *g.repository
	address.Path, address.RawQuery = strings.TrimSuffix(address.Path, "/")+gitReferencePath, "service="+gitService
	response, err := g.send(ctx, http.MethodGet, &address, nil)
	if err != nil {
		return nil, err
	}
	located := *response.Request.URL
	path, hasPath := strings.CutSuffix(located.Path, gitReferencePath)
	if response.Header.Get("Content-Type") != "application/x-"+gitService+"-advertisement" || !hasPath {
		response.Body.Close()
		return nil, errors.New("the server returned no list of Git references")
	}
	located.Path, located.RawQuery = path, ""
	g.repository = &located
	return g.countedBody(response), nil
}

func (g *gitHTTP) request(ctx context.Context, body []byte) (io.ReadCloser, error) {
	address := *g.repository
	address.Path += "/" + gitService
	response, err := g.send(ctx, http.MethodPost, &address, body)
	if err != nil {
		return nil, err
	}
	return g.countedBody(response), nil
}

func (g *gitHTTP) send(ctx context.Context, method string, address *url.URL, body []byte) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, address.String(), bytes.NewReader(body))
	if err != nil {
		return nil, stableError(err)
	}
	if method == http.MethodPost {
		request.Header.Set("Content-Type", "application/x-"+gitService+"-request")
	}
	// After a redirect to another host, no login is sent.
	configured, err := parseGitAddress(g.reference.URL)
	if err == nil && isSameOrigin(configured.url, address) {
		g.login.authorize(request)
	}
	return g.do(request)
}

func (g *gitHTTP) countedBody(response *http.Response) io.ReadCloser {
	return struct {
		io.Reader
		io.Closer
	}{g.download.reader(response.Body), response.Body}
}

func (*gitHTTP) close() {} // the client closes its connections
