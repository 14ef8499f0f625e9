package kube

import "fmt"

const (
	// maxDocumentNodes and maxStreamNodes limit the values in one document of a manifest, and in all of them. The largest
	// CustomResourceDefinitions have a hundred thousand. Text in an object counts as well: a ConfigMap of 1 MiB with
	// nothing but digits and commas has half a million.
	maxDocumentNodes = 1_000_000
	maxStreamNodes   = 3_000_000
)

// CountNodes returns about the number of values in YAML or JSON, and at least half of it: it counts the characters one
// of which comes before each value. While text is parsed, each value takes some hundred bytes of memory, even if it is
// two bytes long: text of users must be counted before it is parsed in a process that serves other users.
func CountNodes(text []byte) (nodes int) {
	for i, char := range text {
		switch char {
		case '\n', '\r', ',', '[', '{':
			nodes++
		case '-', '?', ':':
			if i+1 < len(text) && !isAlphanumeric(text[i+1]) {
				nodes++
			}
		}
	}
	return nodes
}

// CheckNodes returns an error if text is too expensive to parse as one document.
func CheckNodes(text []byte) error {
	if CountNodes(text) > maxDocumentNodes {
		return fmt.Errorf("it has more than %d values", maxDocumentNodes)
	}
	return nil
}

func isAlphanumeric(char byte) bool {
	return '0' <= char && char <= '9' || 'a' <= char && char <= 'z' || 'A' <= char && char <= 'Z'
}
