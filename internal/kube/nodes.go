package kube

import (
	"errors"
	"fmt"
)

const (
	// maxDocumentNodes and maxStreamNodes limit the values in one document of a manifest, and in all of them. The largest
	// CustomResourceDefinitions have a hundred thousand. Text in an object counts as well: a ConfigMap of 1 MiB with
	// nothing but digits and commas has half a million.
	maxDocumentNodes = 1_000_000
	maxStreamNodes   = 3_000_000
)

// CountNodes returns about the number of values in YAML or JSON, and at least half of it. Values and text that aliases
// add count as well. While text is parsed, each value takes some hundred bytes of memory, even if it is two bytes long:
// text of users must be counted before it is parsed in a process that serves other users.
func CountNodes(text []byte) int { return CountNodesParsing(text, maxDocumentNodes) }

// CountNodesParsing is CountNodes, but ignores the aliases of documents with more than limit values: the text must be
// parsed to count them.
func CountNodesParsing(text []byte, limit int) int {
	return countIndicators(text) + countAliases(text, limit)
}

// countIndicators counts the characters one of which comes before each value.
func countIndicators(text []byte) (nodes int) {
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

// errAliases is the error for text that has not too many values without aliases.
var errAliases = errors.New("aliases make it too large")

// CheckNodes returns an error if text is too expensive to parse as one document.
func CheckNodes(text []byte) error {
	_, err := checkNodes(text)
	return err
}

// checkNodes is CheckNodes, and returns the result of CountNodes as well.
func checkNodes(text []byte) (nodes int, err error) {
	if nodes = countIndicators(text); nodes > maxDocumentNodes {
		return nodes, fmt.Errorf("it has more than %d values", maxDocumentNodes)
	}
	if nodes += countAliases(text, maxDocumentNodes); nodes > maxDocumentNodes {
		return nodes, errAliases
	}
	return nodes, nil
}

func isAlphanumeric(char byte) bool {
	return '0' <= char && char <= '9' || 'a' <= char && char <= 'z' || 'A' <= char && char <= 'Z'
}
