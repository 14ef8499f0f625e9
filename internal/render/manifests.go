package render

import (
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// Manifests returns the Kubernetes objects in content, in the order of its files and of what is in them; the items of lists stand for
// the list. Every file is a YAML stream, and a template over the subject if content says so. Errors are phase.Invalid and name the
// ConfigMap or Secret, the key, the document and the line.
func Manifests(content source.Content, subject source.Subject) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	for _, file := range content.Files {
		stream, err := expanded(content, file, subject)
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

// expanded returns the bytes of a file of content, with its templates filled in if it has any.
func expanded(content source.Content, file source.File, subject source.Subject) ([]byte, error) {
	if !content.Template {
		return file.Data, nil
	}
	text, err := subject.Expand(fmt.Sprintf("%s, key %s", content.Reference, file.Name), string(file.Data))
	return []byte(text), err
}

// HasSecret says whether any of objects is a Secret, so that they must be carried as such.
func HasSecret(objects []*unstructured.Unstructured) bool {
	for _, object := range objects {
		if object.GetKind() == "Secret" && object.GroupVersionKind().Group == "" {
			return true
		}
	}
	return false
}
