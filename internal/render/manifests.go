package render

import (
	"crypto/sha256"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// maxManifestsSize and maxExpandedSize limit the two caches of a ManifestRenderer, in bytes of text. Decoded objects
// and their JSON need about seven times as much memory.
const (
	maxManifestsSize = 16 << 20
	maxExpandedSize  = 8 << 20
)

// ManifestRenderer renders manifests. It expands and decodes content that does not depend on the cluster once for all
// members, and decodes equal results of other templates once. It is safe for concurrent use.
type ManifestRenderer struct {
	shared, expanded *cache.Cache[renderedManifests]
}

// renderedManifests are the objects of one content. They must not be changed.
type renderedManifests struct {
	objects   []*unstructured.Unstructured
	documents *kube.Documents
	// needsCluster is true, and all other fields are empty, for templates that read the cluster.
	needsCluster bool
}

// NewManifestRenderer returns a ManifestRenderer with empty caches.
func NewManifestRenderer() *ManifestRenderer {
	return &ManifestRenderer{shared: cache.New[renderedManifests](maxManifestsSize), expanded: cache.New[renderedManifests](maxExpandedSize)}
}

// Render returns Manifests and the documents of the objects. Neither must be changed.
func (r *ManifestRenderer) Render(content source.Content, subject source.Subject) ([]*unstructured.Unstructured, *kube.Documents, error) {
	// The keys have the reference because errors name it.
	key := fmt.Sprintf("%s %s %t", content.Reference, content.Digest, content.Template)
	rendered, err := r.shared.GetOrCompute(key, func() (renderedManifests, int, error) {
		texts, isShared, err := expandFiles(content, subject)
		if !isShared {
			return renderedManifests{needsCluster: true}, cache.MinSize, nil
		}
		if err != nil {
			return renderedManifests{}, 0, err
		}
		return newRenderedManifests(content, texts)
	})
	if rendered.needsCluster {
		texts, _, expandErr := expandFiles(content, subject)
		if expandErr != nil {
			return nil, nil, expandErr
		}
		rendered, err = r.expanded.GetOrCompute(fmt.Sprintf("%s %x", content.Reference, hashTexts(texts)), func() (renderedManifests, int, error) {
			return newRenderedManifests(content, texts)
		})
	}
	return rendered.objects, rendered.documents, err
}

// newRenderedManifests decodes the texts of the files of content, and returns the size of the result as well.
func newRenderedManifests(content source.Content, texts [][]byte) (renderedManifests, int, error) {
	objects, err := decodeTexts(content, texts)
	size := cache.MinSize
	for _, text := range texts {
		size += len(text)
	}
	return renderedManifests{objects: objects, documents: kube.NewDocuments(objects)}, size, err
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

// Manifests returns the Kubernetes objects in content, in the order of its files. The items of a list replace the list.
// Each file is a YAML stream. If content.Template is true, it is a template that is expanded for the subject. Errors
// are phase.Invalid and name the ConfigMap or Secret, the key, the document and the line.
func Manifests(content source.Content, subject source.Subject) ([]*unstructured.Unstructured, error) {
	texts, _, err := expandFiles(content, subject)
	if err != nil {
		return nil, err
	}
	return decodeTexts(content, texts)
}

// decodeTexts returns the objects in the texts of the files of content.
func decodeTexts(content source.Content, texts [][]byte) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	for i, text := range texts {
		found, err := kube.DecodeManifest(text)
		if err != nil {
			return nil, phase.Invalidf("%s, key %s, %w", content.Reference, content.Files[i].Name, err)
		}
		all = append(all, found...)
	}
	return all, nil
}

// expandFiles returns the text of each file of content. It expands the files if content has templates. isShared is true
// if the result, also an error, does not depend on the subject.
func expandFiles(content source.Content, subject source.Subject) (texts [][]byte, isShared bool, err error) {
	texts, isShared = make([][]byte, 0, len(content.Files)), true
	for _, file := range content.Files {
		if !content.Template {
			texts = append(texts, file.Data)
			continue
		}
		expanded, err := subject.ExpandText(fmt.Sprintf("%s, key %s", content.Reference, file.Name), string(file.Data))
		isShared = isShared && expanded.IsShared
		if err != nil {
			return nil, isShared, err
		}
		texts = append(texts, []byte(expanded.Text))
	}
	return texts, isShared, nil
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
