package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/errdef"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/errcode"

	"github.com/towline/towline/internal/archive"
)

// defaultTag is the tag of an artifact whose URL has neither a tag nor a digest.
const defaultTag = "latest"

// fetchArtifact fetches the layers of an OCI artifact, if its digest has changed. A layer is an archive or a file.
func (r *remoteRequest) fetchArtifact(ctx context.Context, address *url.URL) (remoteResult, error) {
	opened, err := r.openRepository(strings.TrimPrefix(address.String(), schemeOCI+"://"))
	if err != nil {
		return remoteResult{}, err
	}
	described, err := opened.Resolve(ctx, opened.Reference.Reference)
	if err != nil {
		return remoteResult{}, registryError(err)
	}
	revision := remoteRevision{Digest: described.Digest.String()}
	if revision == r.known {
		return remoteResult{isUnchanged: true, revision: revision}, nil
	}
	raw, err := r.readBlob(ctx, opened, described, maxManifest)
	if err != nil {
		return remoteResult{}, fmt.Errorf("read its manifest: %w", err)
	}
	manifest, err := decodeManifest(raw)
	if err != nil {
		return remoteResult{}, fmt.Errorf("read its manifest: %w", err)
	}
	if len(manifest.Layers) == 0 {
		return remoteResult{}, errors.New("it is not an OCI artifact with layers")
	}
	files, err := r.readLayers(ctx, opened, manifest.Layers)
	return remoteResult{files: files, revision: revision}, err
}

func (r *remoteRequest) openRepository(name string) (*remote.Repository, error) {
	opened, err := remote.NewRepository(name)
	if err != nil {
		return nil, errors.New("it is not the URL of an OCI artifact")
	}
	opened.Reference.Reference = cmp.Or(opened.Reference.Reference, defaultTag)
	opened.PlainHTTP = r.login.PlainHTTP
	opened.Client = &auth.Client{
		Client: r.client, Cache: auth.NewCache(),
		Credential: auth.StaticCredential(opened.Reference.Registry, auth.Credential{
			Username: r.login.Username, Password: r.login.Password, AccessToken: r.login.Token,
		}),
	}
	return opened, nil
}

func (r *remoteRequest) readLayers(ctx context.Context, opened *remote.Repository, layers []ocispec.Descriptor) (map[string][]byte, error) {
	all := map[string][]byte{}
	limits := archive.DefaultLimits()
	size := 0
	for i, layer := range layers {
		raw, err := r.readBlob(ctx, opened, layer, maxRemoteDownload)
		if err != nil {
			return nil, fmt.Errorf("download its layer %d: %w", i, err)
		}
		name, err := archive.CleanPath(cmp.Or(layer.Annotations[ocispec.AnnotationTitle], fmt.Sprintf("layer-%d.yaml", i)))
		if err != nil {
			return nil, fmt.Errorf("the title of its layer %d: %w", i, err)
		}
		files, err := r.filesIn(ctx, raw, name)
		if err != nil {
			return nil, fmt.Errorf("layer %d: %w", i, err)
		}
		for _, data := range files {
			size += len(data)
		}
		maps.Copy(all, files)
		if len(all) > limits.Files || int64(size) > limits.Size {
			return nil, fmt.Errorf("its layers have more than %d files or more than %d MiB", limits.Files, limits.Size>>20)
		}
	}
	return all, nil
}

// readBlob reads a blob or a manifest of at most limit bytes and verifies its digest.
func (r *remoteRequest) readBlob(ctx context.Context, opened *remote.Repository, described ocispec.Descriptor, limit int64) ([]byte, error) {
	if described.Size > limit {
		return nil, fmt.Errorf("it has more than %d MiB", limit>>20)
	}
	content, err := opened.Fetch(ctx, described)
	if err != nil {
		return nil, registryError(err)
	}
	defer content.Close()
	raw, err := r.download.readAll(content)
	if err != nil {
		return nil, err
	}
	if described.Digest.Validate() != nil || described.Digest.Algorithm().FromBytes(raw) != described.Digest {
		return nil, errors.New("its digest is not the one in the manifest")
	}
	return raw, nil
}

// registryError returns the error of a registry without text of the registry.
func registryError(err error) error {
	if errors.Is(err, errdef.ErrNotFound) {
		return errStatusNotFound
	}
	if tooLarge, ok := errors.AsType[*sizeError](err); ok {
		return tooLarge
	}
	if response, ok := errors.AsType[*errcode.ErrorResponse](err); ok {
		return statusError(response.StatusCode)
	}
	if _, ok := errors.AsType[*url.Error](err); ok || isNetworkError(err) {
		return stableError(err)
	}
	if errors.Is(err, auth.ErrBasicCredentialNotFound) {
		return errors.New("the registry asks for a login, and there is none")
	}
	return errors.New("the registry returned an invalid response")
}
