package kube

import (
	"errors"
	"fmt"
)

const (
	// maxDocumentValues and maxStreamValues limit the values in one document of a manifest, and in all of them. The
	// largest CustomResourceDefinitions have a hundred thousand. Text in an object counts as well: a ConfigMap of 1 MiB
	// with nothing but digits and commas has half a million.
	maxDocumentValues = 1_000_000
	maxStreamValues   = 3_000_000
)

// CountValues returns about the number of values in YAML or JSON, and at least half of it. Values and text that aliases
// add count as well. While text is parsed, each value takes some hundred bytes of memory, even if it is two bytes long:
// text of users must be counted before it is parsed in a process that serves other users.
func CountValues(text []byte) int { return CountValuesParsingUpTo(text, maxDocumentValues) }

// CountValuesParsingUpTo is CountValues, but ignores the aliases of documents with more than limit values: a document
// must be parsed to count its aliases.
func CountValuesParsingUpTo(text []byte, limit int) int {
	return countIndicators(text) + countAliases(text, limit)
}

// countIndicators counts the characters that can precede a value. It can miss half of the values.
func countIndicators(text []byte) (values int) {
	for i, char := range text {
		switch char {
		case '\n', '\r', ',', '[', '{':
			values++
		case '-', '?', ':':
			if i+1 < len(text) && !isAlphanumeric(text[i+1]) {
				values++
			}
		}
	}
	return values
}

// errAliases is the error for text that has too many values only because of its aliases.
var errAliases = errors.New("aliases make it too large")

// CheckValueCount returns an error if text is too expensive to parse as one document.
func CheckValueCount(text []byte) error {
	_, err := checkValueCount(text)
	return err
}

// checkValueCount is CheckValueCount, and returns the result of CountValues as well.
func checkValueCount(text []byte) (values int, err error) {
	if values = countIndicators(text); values > maxDocumentValues {
		return values, fmt.Errorf("it has more than %d values", maxDocumentValues)
	}
	if values += countAliases(text, maxDocumentValues); values > maxDocumentValues {
		return values, errAliases
	}
	return values, nil
}

func isAlphanumeric(char byte) bool {
	return '0' <= char && char <= '9' || 'a' <= char && char <= 'z' || 'A' <= char && char <= 'Z'
}
