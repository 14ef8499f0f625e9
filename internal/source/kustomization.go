package source

import (
	"context"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/phase"
)

// kustomizationKey is the key of a ConfigMap or Secret that holds the archive of a kustomization.
const kustomizationKey = "kustomize.tar.gz"

// KustomizationReference is ManifestsReference for kustomizations.
func KustomizationReference(ref configv1beta1.KustomizationRef, subject Subject) (Reference, error) {
	if ref.RemoteURL != nil {
		return RemoteReference(*ref.RemoteURL, subject)
	}
	return resolve(Reference{Kind: string(ref.Kind), Namespace: ref.Namespace, Name: ref.Name}, subject)
}

// Kustomization reads the files of ref. It fails like Manifests, and with phase.Invalid for an object without data. See
// Content.Archive for a ConfigMap or Secret.
func (c *Contents) Kustomization(ctx context.Context, ref configv1beta1.KustomizationRef, subject Subject) (Content, error) {
	reference, err := KustomizationReference(ref, subject)
	if err != nil {
		return Content{}, err
	}
	content, err := c.read(ctx, reference, ref.Optional)
	switch {
	case err != nil:
		return Content{}, err
	case len(content.Files) == 0 && !ref.Optional:
		return Content{}, phase.Invalidf("%s has no data", reference)
	case (content.Template || content.Lua) && reference.isObject():
		return Content{}, phase.Invalidf("%s: a kustomization is no template or script (annotations %s and %s), but the built objects are a template, with values or valuesFrom",
			reference, libv1beta1.TemplateAnnotation, libv1beta1.LuaAnnotation)
	}
	return content, nil
}

// isObject returns whether the content of r is the data of an object on the hub.
func (r Reference) isObject() bool { return r.Kind == kindConfigMap || r.Kind == kindSecret }

// Archive returns the file of a ConfigMap or Secret that holds an archive with the files of a kustomization:
// kustomize.tar.gz, or the only file if it is an archive. Otherwise it returns false, and the files of the content are
// those of the kustomization.
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
