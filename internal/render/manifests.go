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

// maxManifestsSize and maxExpandedSize limit the two caches of a ManifestRenderer, in bytes of memory. Decoded objects
// and their JSON need about eleven times the size of their text.
const (
	maxManifestsSize = 64 << 20
	maxExpandedSize  = 16 << 20
)

// maxContent is the maximum size in bytes of the manifests of one reference, which are decoded in this process.
const maxContent = 32 << 20

// ManifestRenderer renders manifests. It expands and decodes content that does not depend on the cluster once for all
// members, and decodes equal results of other templates once. It is safe for concurrent use.
type ManifestRenderer struct {
	shared, expanded *cache.Cache[renderedManifests]
	// unpacking is locked while an archive is unpacked. So only one archive at a time needs memory for both forms.
	unpacking sync.Mutex
}

// maxUnpacked limits the unpacked archives of one ConfigMap or Secret, which has less than 1 MiB itself.
func maxUnpacked() archive.Limits { return archive.Limits{Files: 10_000, Size: 8 << 20} }

// unpack returns content with the files in its archives, for which it reserves memory until release is called.
func (r *ManifestRenderer) unpack(content source.Content, reserved *kube.ContentReservation) (unpacked source.Content, release func(), err error) {
	release = func() {}
	if !slices.ContainsFunc(content.Files, func(file source.File) bool { return archive.IsArchive(file.Data) }) {
		return content, release, nil
	}
	needed := maxUnpacked().Size
	if err := reserved.Add(needed); err != nil {
		return source.Content{}, release, fmt.Errorf("%s: %w", content.Reference, err)
	}
	r.unpacking.Lock()
	defer r.unpacking.Unlock()
	unpacked, err = content.Unpacked(maxUnpacked())
	return unpacked, func() { reserved.Subtract(needed) }, err
}

// renderedManifests are the objects of one content. They must not be changed.
type renderedManifests struct {
	objects   []*unstructured.Unstructured
	documents *kube.Documents
	// dependsOn is what the templates read. If it is more than the caller allows, all other fields are empty.
	dependsOn dependency
}

// dependency is the part of the subject that determines the result of templates.
type dependency int

const (
	dependsOnNothing dependency = iota
	dependsOnResources
	dependsOnSubject
)

// dependencyOf returns what the result of a template or script depends on.
func dependencyOf(expanded source.Expanded) dependency {
	switch {
	case expanded.IsShared:
		return dependsOnNothing
	case expanded.OnlyResources:
		return dependsOnResources
	}
	return dependsOnSubject
}

// NewManifestRenderer returns a ManifestRenderer with empty caches.
func NewManifestRenderer() *ManifestRenderer {
	return &ManifestRenderer{
		shared: cache.New[renderedManifests](maxManifestsSize), expanded: cache.New[renderedManifests](maxExpandedSize),
	}
}

// Render returns the Kubernetes objects in content, in the order of its files, and their documents. Neither must be
// changed. The items of a list replace the list. Each file is a YAML stream, the template of one if content.Template is
// true, or the script that returns one if content.Lua is true, or an archive of such files. Errors name the ConfigMap
// or Secret, the key, the document and the line. They are phase.Invalid, except errors of
// kube.ContentReservation.Add.
func (r *ManifestRenderer) Render(content source.Content, subject source.Subject) ([]*unstructured.Unstructured, *kube.Documents, error) {
	// The keys have the reference because errors name it, and the scope of the calls of the sandbox.
	key := fmt.Sprintf("%s %s %t %t %s", content.Reference, content.Digest, content.Template, content.Lua, subject.RestrictedNamespace)
	// Content without templates that read anything is rendered once for all, then once for all subjects with the same
	// resources, and otherwise for this subject only.
	rendered, err := r.renderShared(key, dependsOnNothing, content, subject)
	if rendered.dependsOn == dependsOnResources {
		rendered, err = r.renderShared(key+" "+subject.Resources.Digest, dependsOnResources, content, subject)
	}
	if rendered.dependsOn == dependsOnSubject || errors.Is(err, errNotKnown) {
		content, release, unpackErr := r.unpack(content, subject.Memory)
		defer release()
		if unpackErr != nil {
			return nil, nil, unpackErr
		}
		texts, _, expandErr := expandFiles(content, subject)
		if expandErr != nil {
			return nil, nil, expandErr
		}
		rendered, err = r.expanded.GetOrCompute(fmt.Sprintf("%s %x", content.Reference, hashTexts(texts)), func() (renderedManifests, int, error) {
			return decodeContent(content.WithSensitivityOf(subject), texts, subject.Memory)
		})
	}
	return rendered.objects, rendered.documents, err
}

// errNotKnown is the error of renderShared if the sandbox could not expand a template: then it is not known what the
// result depends on. An expansion that fails for one profile may succeed for another one, so each caller tries it.
var errNotKnown = errors.New("the template was not expanded")

// renderShared renders content once for all subjects that have the same key. If the result depends on more than
// allowed, it returns dependsOn only.
func (r *ManifestRenderer) renderShared(key string, allowed dependency, content source.Content, subject source.Subject) (renderedManifests, error) {
	return r.shared.GetOrCompute(key, func() (renderedManifests, int, error) {
		content, release, err := r.unpack(content, subject.Memory)
		defer release()
		if err != nil {
			return renderedManifests{}, 0, err
		}
		texts, dependsOn, err := expandFiles(content, subject)
		if kube.IsMemoryError(err) {
			return renderedManifests{}, 0, err
		}
		if _, isInvalid := errors.AsType[phase.Invalid](err); err != nil && !isInvalid {
			return renderedManifests{}, 0, errNotKnown
		}
		if dependsOn > allowed {
			return renderedManifests{dependsOn: dependsOn}, cache.MinSize, nil
		}
		if err != nil {
			return renderedManifests{}, 0, err
		}
		return decodeContent(content.WithSensitivityOf(subject), texts, subject.Memory)
	})
}

// decodeContent reserves memory for the texts of the files of content, decodes them, and returns the size of the result
// as well.
func decodeContent(content source.Content, texts [][]byte, reserved *kube.ContentReservation) (renderedManifests, int, error) {
	size := 0
	for _, text := range texts {
		size += len(text)
	}
	if size > maxContent {
		return renderedManifests{}, 0, phase.Invalidf("%s has more than %d MiB of manifests", content.Reference, maxContent>>20)
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

// hashTexts returns a hash of texts.
func hashTexts(texts [][]byte) []byte {
	hash := sha256.New()
	for _, text := range texts {
		_, _ = fmt.Fprintln(hash, len(text)) // a hash returns no error
		_, _ = hash.Write(text)
	}
	return hash.Sum(nil)
}

// decodeTexts returns the objects in the texts of the files of content. Afterwards the objects have added bytes in
// reserved.
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

// decodeError returns the error of a text of content, which is a phase.Invalid unless memory is missing.
func decodeError(content source.Content, origin string, err error) error {
	if kube.IsMemoryError(err) {
		return fmt.Errorf("%s: %w", origin, err)
	}
	err = phase.Invalidf("%s, %w", origin, err)
	if content.Sensitive {
		err = source.HideDetails(origin, err)
	}
	return err
}

// expandFiles returns the text of each file of content. It expands the files if content has templates, and runs them if
// they are scripts. dependsOn is what the result, also an error, depends on.
func expandFiles(content source.Content, subject source.Subject) (texts [][]byte, dependsOn dependency, err error) {
	texts = make([][]byte, 0, len(content.Files))
	expand := subject.ExpandText
	if content.Lua {
		expand = subject.RunScript
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

// originOf returns a file of content for messages.
func originOf(content source.Content, file source.File) string {
	return fmt.Sprintf("%s, key %s", content.Reference, file.Name)
}

// HasSecret returns whether any of the objects is a Secret, so that all of them must be delivered in Secrets.
func HasSecret(objects []*unstructured.Unstructured) bool {
	for _, object := range objects {
		if object.GetKind() == "Secret" && object.GroupVersionKind().Group == "" {
			return true
		}
	}
	return false
}
