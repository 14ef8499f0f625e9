package source

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/phase"
)

// kustomizationKey is the key of a ConfigMap or Secret that holds the archive of a kustomization.
const kustomizationKey = "kustomize.tar.gz"

// ResolveKustomizationRef is ResolvePolicyRef for kustomizations.
func ResolveKustomizationRef(ref configv1beta1.KustomizationRef, tmplCtx TemplateContext) (Reference, error) {
	if ref.RemoteURL != nil {
		return ResolveRemoteSource(*ref.RemoteURL, tmplCtx)
	}
	return expandReference(Reference{Kind: string(ref.Kind), Namespace: ref.Namespace, Name: ref.Name}, tmplCtx)
}

// Kustomization reads the files of ref. It fails like Manifests, and with phase.TerminalError for an object without
// data. See Content.Archive for a ConfigMap or Secret. The caller must ignore Template and Lua: for a kustomization,
// the built objects can be templates, but not the files.
func (c *Contents) Kustomization(ctx context.Context, ref configv1beta1.KustomizationRef, tmplCtx TemplateContext) (Content, error) {
	reference, err := ResolveKustomizationRef(ref, tmplCtx)
	if err != nil {
		return Content{}, err
	}
	content, err := c.read(ctx, reference, ref.Optional)
	if err == nil && len(content.Files) == 0 && !ref.Optional {
		err = phase.TerminalErrorf("%s has no data", reference)
	}
	return content, err
}

// Unpacked replaces each archive in a ConfigMap or Secret by the manifests in it. Their names begin with the key of the
// archive. The limits apply to all archives together. All errors are phase.TerminalError.
func (c Content) Unpacked(limits archive.Limits) (Content, error) {
	isArchive := func(file File) bool { return archive.IsArchive(file.Data) }
	if !c.Reference.isObject() || !slices.ContainsFunc(c.Files, isArchive) {
		return c, nil
	}
	var all []File
	for _, file := range c.Files {
		if !isArchive(file) {
			all = append(all, file)
			continue
		}
		manifests, err := unpackManifests(file, &limits)
		if err != nil {
			origin := fmt.Sprintf("%s, key %s", c.Reference, file.Name)
			if c.Sensitive {
				return Content{}, HideDetails(origin, phase.TerminalError{Err: err})
			}
			return Content{}, phase.TerminalErrorf("%s: %w", origin, err)
		}
		all = append(all, manifests...)
	}
	c.Files = all
	return c, nil
}

// unpackManifests returns the manifests in an archive, sorted by path, and subtracts all files in it from the limits.
func unpackManifests(packed File, limits *archive.Limits) ([]File, error) {
	files, err := archive.Read(packed.Data, *limits)
	if err != nil {
		return nil, err
	}
	var manifests []File
	for _, name := range slices.Sorted(maps.Keys(files)) {
		limits.Files--
		limits.Size -= int64(len(files[name]))
		if isManifest(name) {
			manifests = append(manifests, File{Name: packed.Name + "/" + name, Data: files[name]})
		}
	}
	if len(manifests) == 0 {
		return nil, errors.New("the archive has no file that ends in .yaml, .yml or .json") // to deploy nothing would delete everything
	}
	return manifests, nil
}

// isObject returns whether r is a ConfigMap or Secret.
func (r Reference) isObject() bool { return r.Kind == kindConfigMap || r.Kind == kindSecret }

// Archive returns the file of a ConfigMap or Secret that holds an archive with the files of a kustomization:
// kustomize.tar.gz, or the only file if it is an archive. Otherwise it returns false, and c.Files are the files of the
// kustomization.
func (c Content) Archive() (File, bool) {
	if !c.Reference.isObject() {
		return File{}, false
	}
	for _, file := range c.Files {
		if file.Name == kustomizationKey {
			return file, true
		}
	}
	if len(c.Files) == 1 && archive.IsArchive(c.Files[0].Data) {
		return c.Files[0], true
	}
	return File{}, false
}
