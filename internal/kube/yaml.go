package kube

import "sigs.k8s.io/yaml"

// YAMLToJSON returns the JSON of a document of YAML. It returns the error of CheckValueCount without parsing the
// document.
func YAMLToJSON(document []byte) ([]byte, error) {
	if err := CheckValueCount(document); err != nil {
		return nil, err
	}
	return yaml.YAMLToJSON(document)
}

// UnmarshalYAML decodes a document of YAML by way of JSON. It returns the error of CheckValueCount without parsing the
// document.
func UnmarshalYAML(document []byte, into any) error {
	if err := CheckValueCount(document); err != nil {
		return err
	}
	return yaml.Unmarshal(document, into)
}
