package render

import (
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// ManifestRenderer renders manifests. It caches the objects of content without templates, which all members share. It
// is safe for concurrent use.
type ManifestRenderer struct {
	cache *sizedCache[renderedManifests]
}

// renderedManifests are the objects of one content. They must not be changed.
type renderedManifests struct {
	objects   []*unstructured.Unstructured
	documents *kube.Documents
}

// NewManifestRenderer returns a ManifestRenderer with an empty cache.
func NewManifestRenderer() *ManifestRenderer {
	return &ManifestRenderer{cache: newSizedCache[renderedManifests](maxManifestsSize)}
}

// Render returns Manifests and the documents of the objects. Neither must be changed.
func (r *ManifestRenderer) Render(content source.Content, subject source.Subject) ([]*unstructured.Unstructured, *kube.Documents, error) {
	if !content.Template {
		if known, ok := r.cache.get(content.Digest); ok {
			return known.objects, known.documents, nil
		}
	}
	objects, err := Manifests(content, subject)
	if err != nil || content.Template {
		return objects, nil, err
	}
	size := minCountedSize
	for _, file := range content.Files {
		size += len(file.Data)
	}
	shared := r.cache.getOrPut(content.Digest, renderedManifests{objects, kube.NewDocuments(objects)}, size)
	return shared.objects, shared.documents, nil
}

// Manifests returns the Kubernetes objects in content, in the order of its files. The items of a list replace the list.
// Each file is a YAML stream. If content.Template is true, it is a template that is expanded for the subject. Errors
// are phase.Invalid and name the ConfigMap or Secret, the key, the document and the line.
func Manifests(content source.Content, subject source.Subject) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	for _, file := range content.Files {
		stream, err := expandFile(content, file, subject)
		if err != nil {
			return nil, err
		}
		found, err := kube.DecodeManifest(stream)
		if err != nil {
			return nil, phase.Invalidf("%s, key %s, %w", content.Reference, file.Name, err)
		}
		all = append(all, found...)
	}
	return all, nil
}

// expandFile returns the bytes of a file. It expands the file if content has templates.
func expandFile(content source.Content, file source.File, subject source.Subject) ([]byte, error) {
	if !content.Template {
		return file.Data, nil
	}
	text, err := subject.Expand(fmt.Sprintf("%s, key %s", content.Reference, file.Name), string(file.Data))
	return []byte(text), err
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
