package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/errdef"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/errcode"

	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// maxTags limits the tags of one chart: a registry can return an endless list of pages.
const maxTags = 100_000

// tagOverhead is the memory of a tag in addition to its text, in bytes.
const tagOverhead = 16

// maxManifest limits a manifest in bytes: registries accept up to 4 MiB.
const maxManifest = 4 << 20

// maxManifestNodes limits the JSON values in a manifest: a layer of three bytes takes over a hundred bytes of memory.
const maxManifestNodes = 50_000

// ociRegistry is a repository of charts in an OCI registry: one artifact per chart, one tag per version.
type ociRegistry struct {
	charts *Charts
	base   string // host and path, without scheme and trailing slash
	login  Login
	http   *http.Client
}

var _ repository = (*ociRegistry)(nil)

func newOCIRegistry(charts *Charts, address string, login Login, transport http.RoundTripper) repository {
	return &ociRegistry{
		charts: charts,
		base:   strings.TrimRight(strings.TrimPrefix(address, "oci://"), "/"),
		login:  login,
		http:   &http.Client{Transport: transport, CheckRedirect: checkRedirect},
	}
}

func (r *ociRegistry) openRepository(name string) (*remote.Repository, error) {
	opened, err := remote.NewRepository(r.base + "/" + name)
	if err != nil {
		// The error would have the whole URL, and so a password in it.
		return nil, phase.TerminalErrorf("%s with chart %q is not a reference to a registry", redacted("oci://"+r.base), name)
	}
	opened.PlainHTTP = r.login.PlainHTTP
	opened.Client = &auth.Client{
		Client:     r.http,
		Cache:      auth.NewCache(),
		Credential: auth.StaticCredential(opened.Reference.Registry, auth.Credential{Username: r.login.Username, Password: r.login.Password}),
	}
	return opened, nil
}

// locate requests the tag of an exact version. For a range, it lists the tags.
func (r *ociRegistry) locate(ctx context.Context, name, version string) (location, error) {
	opened, err := r.openRepository(name)
	if err != nil {
		return location{}, err
	}
	candidates := spellings(version)
	if !isExact(version) {
		versions, err := r.versions(ctx, name)
		if err != nil {
			return location{}, err
		}
		chosen, err := chooseVersion(versions, version)
		if err != nil {
			return location{}, err
		}
		candidates = []string{chosen}
	}
	for _, candidate := range candidates {
		descriptor, err := opened.Resolve(ctx, tagOf(candidate))
		if errors.Is(err, errdef.ErrNotFound) {
			continue
		}
		if err != nil {
			return location{}, fmt.Errorf("look up %s:%s: %w", opened.Reference.Repository, tagOf(candidate), registryError(err))
		}
		return location{
			version: candidate,
			url:     name,
			digest:  descriptor.Digest.String(),
			file:    path.Base(name) + "-" + candidate + ".tgz",
		}, nil
	}
	return location{}, ErrNotFound
}

// versions returns the tags of a chart as versions. It sends no request if they were listed within indexTTL. Otherwise
// each cluster of a rollout would list them, and the registry would return Too Many Requests.
func (r *ociRegistry) versions(ctx context.Context, name string) ([]string, error) {
	key := "tags " + r.base + "/" + name + " " + r.login.digest()
	if known := r.charts.cachedIndex(key); known != nil && r.charts.clock.Since(known.checked) < indexTTL {
		return known.tags, nil
	}
	opened, err := r.openRepository(name)
	if err != nil {
		return nil, err
	}
	versions, err := listVersions(ctx, opened)
	if err != nil {
		return nil, err
	}
	size := cache.MinSize
	for _, version := range versions {
		size += tagOverhead + len(version)
	}
	r.charts.cacheIndex(key, &index{tags: versions, checked: r.charts.clock.Now(), size: size})
	return versions, nil
}

// listVersions returns the tags of a chart as versions.
func listVersions(ctx context.Context, opened *remote.Repository) ([]string, error) {
	var versions []string
	err := opened.Tags(ctx, "", func(tags []string) error {
		for _, tag := range tags {
			// A tag cannot hold the plus sign of build metadata.
			versions = append(versions, strings.ReplaceAll(tag, "_", "+"))
		}
		if len(versions) > maxTags {
			return &sizeError{fmt.Sprintf("it has more than %d tags", maxTags)}
		}
		return nil
	})
	if answer, ok := errors.AsType[*errcode.ErrorResponse](err); ok && answer.StatusCode == http.StatusNotFound {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("list the tags of %s: %w", opened.Reference.Repository, registryError(err))
	}
	return versions, nil
}

func (r *ociRegistry) download(ctx context.Context, at location) ([]byte, error) {
	archive, err := r.downloadLayer(ctx, at, maxArchive, chartMediaTypes()...)
	if errors.Is(err, ErrNotFound) {
		return nil, fmt.Errorf("%s/%s is not a Helm chart", r.base, at.url)
	}
	return archive, err
}

// downloadProvenance returns the layer with the provenance file, which `helm push` adds.
func (r *ociRegistry) downloadProvenance(ctx context.Context, at location) ([]byte, error) {
	return r.downloadLayer(ctx, at, maxProvenanceBytes, "application/vnd.cncf.helm.chart.provenance.v1.prov")
}

// downloadLayer returns the first layer of a chart that has one of the media types. It fails with ErrNotFound if there
// is none.
func (r *ociRegistry) downloadLayer(
	ctx context.Context, at location, limit int64, mediaTypes ...string,
) ([]byte, error) {
	opened, err := r.openRepository(at.url)
	if err != nil {
		return nil, err
	}
	manifest, err := readManifest(ctx, opened, at.digest)
	if err != nil {
		return nil, err
	}
	for _, layer := range manifest.Layers {
		if slices.Contains(mediaTypes, layer.MediaType) {
			raw, err := fetchBlob(ctx, opened, layer, limit)
			if err != nil {
				return nil, fmt.Errorf("download %s: %w", opened.Reference.Repository, err)
			}
			return raw, nil
		}
	}
	return nil, ErrNotFound
}

// readManifest returns the manifest with a digest or tag. It fails with ErrNotFound if the manifest is missing.
func readManifest(ctx context.Context, opened *remote.Repository, reference string) (ocispec.Manifest, error) {
	described, err := opened.Resolve(ctx, reference)
	if err != nil {
		return ocispec.Manifest{}, fmt.Errorf("look up %s of %s: %w", reference, opened.Reference.Repository, registryError(err))
	}
	raw, err := fetchBlob(ctx, opened, described, maxManifest)
	if err != nil {
		return ocispec.Manifest{}, fmt.Errorf("read the manifest %s of %s: %w", reference, opened.Reference.Repository, err)
	}
	manifest, err := decodeManifest(raw)
	if err != nil {
		return ocispec.Manifest{}, fmt.Errorf("read the manifest %s of %s: %w", reference, opened.Reference.Repository, err)
	}
	return manifest, nil
}

// decodeManifest decodes a manifest of a registry. Its errors contain no text that the registry sent.
func decodeManifest(raw []byte) (manifest ocispec.Manifest, err error) {
	if kube.CountValues(raw) > maxManifestNodes {
		return manifest, fmt.Errorf("it has more than %d values", maxManifestNodes)
	}
	if json.Unmarshal(raw, &manifest) != nil {
		return manifest, errors.New("it is not a valid OCI manifest")
	}
	return manifest, nil
}

// fetchBlob reads a blob or manifest of at most limit bytes and verifies its digest.
func fetchBlob(ctx context.Context, opened *remote.Repository, described ocispec.Descriptor, limit int64) ([]byte, error) {
	if described.Size > limit {
		return nil, fmt.Errorf("it has more than %d MiB", limit>>20)
	}
	reader, err := opened.Fetch(ctx, described)
	if err != nil {
		return nil, registryError(err)
	}
	defer reader.Close()
	// content.FetchAll allocates the memory for the whole size at once, before the server sends a byte.
	verified := content.NewVerifyReader(reader, described)
	raw, err := io.ReadAll(verified)
	if err == nil {
		err = verified.Verify()
	}
	if err != nil {
		return nil, registryError(err)
	}
	return raw, nil
}

// chartMediaTypes returns the media types of a chart's layer: Helm's own, and the one that early Helm versions used.
func chartMediaTypes() []string {
	return []string{"application/vnd.cncf.helm.chart.content.v1.tar+gzip", "application/tar+gzip"}
}

func tagOf(version string) string { return strings.ReplaceAll(version, "+", "_") }
