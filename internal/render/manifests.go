package render

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// maxManifestsSize and maxExpandedSize limit the caches shared and expanded of a ManifestRenderer, in bytes of memory.
// Decoded objects and their JSON need about eleven times the size of their text.
const (
	maxManifestsSize = 64 << 20
	maxExpandedSize  = 16 << 20
)

// maxContent is the maximum size in bytes of the manifests of one reference, which are decoded in this process.
const maxContent = 32 << 20

// ManifestRenderer renders manifests. Content that does not depend on the cluster is expanded and decoded once for all
// members. Other templates are expanded for each member, and equal results are decoded once. It is safe for concurrent
// use.
type ManifestRenderer struct {
	// shared has the objects by the digest of their content and, if templates read resources, the digest of these.
	// expanded has the objects by their expanded text.
	shared, expanded *cache.Cache[renderedManifests]
	// unpacking is locked while an archive is unpacked: only one archive at a time needs memory for both forms, packed and
	// unpacked.
	unpacking sync.Mutex
}

// maxManifestArchive limits the unpacked archives of one ConfigMap or Secret, which has less than 1 MiB itself.
func maxManifestArchive() archive.Limits { return archive.Limits{Files: 10_000, Size: 8 << 20} }

// unpack replaces the archives in content by their files. The caller must always call release, after the last use of
// the files: it releases their memory.
func (r *ManifestRenderer) unpack(content source.Content, reserved *kube.ContentReservation) (unpacked source.Content, release func(), err error) {
	release = func() {}
	if !slices.ContainsFunc(content.Files, func(file source.File) bool { return archive.IsArchive(file.Data) }) {
		return content, release, nil
	}
	needed := maxManifestArchive().Size
	if err := reserved.Add(needed); err != nil {
		return source.Content{}, release, fmt.Errorf("%s: %w", content.Reference, err)
	}
	r.unpacking.Lock()
	defer r.unpacking.Unlock()
	unpacked, err = content.Unpacked(maxManifestArchive())
	return unpacked, func() { reserved.Subtract(needed) }, err
}

// renderedManifests are the objects of one content. They must not be changed.
type renderedManifests struct {
	objects   []*unstructured.Unstructured
	documents *kube.Documents
	// dependsOn is set only if it is more than the caller of renderShared allows. All other fields are empty then.
	dependsOn dependency
}

// dependency is the part of the template context that determines the result of templates.
type dependency int

const (
	dependsOnNothing   dependency = iota
	dependsOnResources            // only on TemplateContext.Resources
	dependsOnTemplateContext
)

// dependencyOf returns the dependency of the result of a template or script.
func dependencyOf(expanded source.Expanded) dependency {
	switch {
	case expanded.IsShared:
		return dependsOnNothing
	case expanded.OnlyResources:
		return dependsOnResources
	}
	return dependsOnTemplateContext
}

// NewManifestRenderer returns a ManifestRenderer with empty caches.
func NewManifestRenderer() *ManifestRenderer {
	return &ManifestRenderer{
		shared: cache.New[renderedManifests](maxManifestsSize), expanded: cache.New[renderedManifests](maxExpandedSize),
	}
}

// Render returns the Kubernetes objects in content, in the order of its files, and their documents. Neither must be
// changed. The items of a list replace the list. Each file is a YAML stream, or an archive of such files. If
// content.Template is true, the files are templates of streams; if content.Lua is true, they are scripts that return
// streams. Errors name the ConfigMap or Secret, the key, the document and the line. They are phase.TerminalError,
// except errors of kube.ContentReservation.Add.
func (r *ManifestRenderer) Render(content source.Content, tmplCtx source.TemplateContext) ([]*unstructured.Unstructured, *kube.Documents, error) {
	// All keys have the reference, because errors name it. The keys of shared have the scope, RestrictedNamespace, because
	// a child of the sandbox has expanded the result. The keys of expanded need none: they have the expanded text.
	key := fmt.Sprintf("%s %s %t %t %s", content.Reference, content.Digest, content.Template, content.Lua, tmplCtx.RestrictedNamespace)
	// Content is rendered once for all template contexts if no template reads anything, once for all template contexts
	// with the same resources if templates read only these, and otherwise for this template context.
	rendered, err := r.renderShared(key, dependsOnNothing, content, tmplCtx)
	if rendered.dependsOn == dependsOnResources {
		rendered, err = r.renderShared(key+" "+tmplCtx.Resources.Digest, dependsOnResources, content, tmplCtx)
	}
	if rendered.dependsOn == dependsOnTemplateContext || errors.Is(err, errDependencyUnknown) {
		content, release, unpackErr := r.unpack(content, tmplCtx.Memory)
		defer release()
		if unpackErr != nil {
			return nil, nil, unpackErr
		}
		texts, _, expandErr := expandFiles(content, tmplCtx)
		if expandErr != nil {
			return nil, nil, expandErr
		}
		rendered, err = r.expanded.GetOrCompute(fmt.Sprintf("%s %x", content.Reference, hashTexts(texts)), func() (renderedManifests, int, error) {
			return decodeContent(content.WithSensitivityOf(tmplCtx), texts, tmplCtx.Memory)
		})
	}
	return rendered.objects, rendered.documents, err
}

// errDependencyUnknown is the error of renderShared if a template could not be expanded for another reason than
// phase.TerminalError, for example a limit of the sandbox. The expansion may succeed for another profile, so each
// caller tries it.
var errDependencyUnknown = errors.New("the template was not expanded")

// renderShared renders content once for all template contexts with the same key. If the result depends on more than
// allowed, it returns only dependsOn.
func (r *ManifestRenderer) renderShared(key string, allowed dependency, content source.Content, tmplCtx source.TemplateContext) (renderedManifests, error) {
	return r.shared.GetOrCompute(key, func() (renderedManifests, int, error) {
		content, release, err := r.unpack(content, tmplCtx.Memory)
		defer release()
		if err != nil {
			return renderedManifests{}, 0, err
		}
		texts, dependsOn, err := expandFiles(content, tmplCtx)
		if kube.IsMemoryError(err) {
			return renderedManifests{}, 0, err
		}
		if _, isInvalid := errors.AsType[phase.TerminalError](err); err != nil && !isInvalid {
			return renderedManifests{}, 0, errDependencyUnknown
		}
		if dependsOn > allowed {
			return renderedManifests{dependsOn: dependsOn}, cache.MinSize, nil
		}
		if err != nil {
			return renderedManifests{}, 0, err
		}
		return decodeContent(content.WithSensitivityOf(tmplCtx), texts, tmplCtx.Memory)
	})
}

// decodeContent decodes the texts of the files of content, reserves memory for the result, and also returns its size.
func decodeContent(content source.Content, texts [][]byte, reserved *kube.ContentReservation) (renderedManifests, int, error) {
	size := 0
	for _, text := range texts {
		size += len(text)
	}
	if size > maxContent {
		return renderedManifests{}, 0, phase.TerminalErrorf("%s has more than %d MiB of manifests", content.Reference, maxContent>>20)
	}
	objects, added, err := decodeTexts(content, texts, reserved)
	if err != nil {
		return renderedManifests{}, 0, err
	}
	rendered := renderedManifests{objects: objects, documents: kube.NewDocuments(objects)}
	if err := reserved.MoveToDocuments(rendered.documents, added); err != nil {
		return renderedManifests{}, 0, err
	}
	return rendered, cache.MinSize + int(rendered.documents.Memory()), nil
}

func hashTexts(texts [][]byte) []byte {
	hash := sha256.New()
	for _, text := range texts {
		_, _ = fmt.Fprintln(hash, len(text)) // a hash returns no error
		_, _ = hash.Write(text)
	}
	return hash.Sum(nil)
}

// decodeTexts returns the objects in the texts of the files of content. added is the memory that it has reserved for
// them, in bytes.
func decodeTexts(content source.Content, texts [][]byte, reserved *kube.ContentReservation) (all []*unstructured.Unstructured, added int64, err error) {
	for i, text := range texts {
		found, memory, err := kube.DecodeManifestReserving(reserved, text)
		if err != nil {
			reserved.Subtract(added)
			return nil, 0, decodeError(content, originOf(content, content.Files[i]), err)
		}
		all, added = append(all, found...), added+memory
	}
	return all, added, nil
}

// decodeError wraps the error of a text of content: a phase.TerminalError, unless it is a memory error.
func decodeError(content source.Content, origin string, err error) error {
	if kube.IsMemoryError(err) {
		return fmt.Errorf("%s: %w", origin, err)
	}
	err = phase.TerminalErrorf("%s, %w", origin, err)
	if content.Sensitive {
		err = source.HideDetails(origin, err)
	}
	return err
}

// expandFiles returns the text of each file of content. It expands templates and runs scripts. dependsOn is the
// dependency of the result, also of an error.
func expandFiles(content source.Content, tmplCtx source.TemplateContext) (texts [][]byte, dependsOn dependency, err error) {
	texts = make([][]byte, 0, len(content.Files))
	expand := tmplCtx.ExpandTracked
	if content.Lua {
		expand = tmplCtx.RunScript
	}
	for _, file := range content.Files {
		if !content.Template && !content.Lua {
			texts = append(texts, file.Data)
			continue
		}
		origin := originOf(content, file)
		expanded, err := expand(origin, string(file.Data))
		dependsOn = max(dependsOn, dependencyOf(expanded))
		if err != nil && content.Sensitive {
			err = source.HideDetails(origin, err)
		}
		if err != nil {
			return nil, dependsOn, err
		}
		texts = append(texts, []byte(expanded.Text))
	}
	return texts, dependsOn, nil
}

// originOf describes a file of content in messages.
func originOf(content source.Content, file source.File) string {
	return fmt.Sprintf("%s, key %s", content.Reference, file.Name)
}

// HasSecret returns whether one of the objects is a Secret. Then all of them must be delivered in Secrets.
func HasSecret(objects []*unstructured.Unstructured) bool {
	for _, object := range objects {
		if object.GetKind() == "Secret" && object.GroupVersionKind().Group == "" {
			return true
		}
	}
	return false
}
