package kube

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// DecodeManifest reads the objects of a YAML or JSON text of one or more documents, in order. Empty documents are skipped and lists
// are replaced by what they hold. An error names the document, counted from 1, that is not an object with an apiVersion, a kind and a name.
func DecodeManifest(text []byte) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for number := 1; ; number++ {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read document %d: %w", number, err)
		}
		found, err := decodeDocument(document)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", number, err)
		}
		objects = append(objects, found...)
	}
}

func decodeDocument(document []byte) ([]*unstructured.Unstructured, error) {
	raw, err := yaml.YAMLToJSON(document)
	if err != nil {
		return nil, err
	}
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) || bytes.Equal(raw, []byte("{}")) {
		return nil, nil
	}
	if raw[0] != '{' {
		return nil, errors.New("it is not a Kubernetes object")
	}
	obj := &unstructured.Unstructured{}
	if err := obj.UnmarshalJSON(raw); err != nil {
		return nil, missing(raw, err)
	}
	if obj.IsList() {
		return listItems(obj)
	}
	return []*unstructured.Unstructured{obj}, checkIdentity(obj)
}

// missing says what an object that does not decode lacks, in fewer words than the decoder, which quotes the whole of it: content can be secret.
func missing(raw []byte, err error) error {
	var fields map[string]any
	if yaml.Unmarshal(raw, &fields) != nil {
		return errors.New("it is not a Kubernetes object")
	}
	if kind, _ := fields["kind"].(string); kind == "" {
		return errors.New("kind is missing")
	}
	return err
}

func listItems(list *unstructured.Unstructured) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	index := 0
	err := list.EachListItem(func(item runtime.Object) error {
		index++
		obj, ok := item.(*unstructured.Unstructured)
		if !ok {
			return fmt.Errorf("item %d of %s is not a Kubernetes object", index, list.GetKind())
		}
		if err := checkIdentity(obj); err != nil {
			return fmt.Errorf("item %d of %s: %w", index, list.GetKind(), err)
		}
		objects = append(objects, obj)
		return nil
	})
	return objects, err
}

func checkIdentity(obj *unstructured.Unstructured) error {
	switch {
	case obj.GetKind() == "":
		return errors.New("kind is missing")
	case obj.GetAPIVersion() == "":
		return fmt.Errorf("%s: apiVersion is missing", obj.GetKind())
	case obj.GetName() == "":
		return fmt.Errorf("%s: metadata.name is missing", obj.GetKind())
	}
	return nil
}
