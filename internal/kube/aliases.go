package kube

import (
	"bytes"
	"errors"
	"slices"

	goyaml "go.yaml.in/yaml/v2"
)

const (
	// Each value that an alias adds increases the count by aliasedNode, and each byte of its text by aliasedByte. The
	// limit of a million is 125,000 values, or 1 MiB of text: API servers store no much larger objects.
	aliasedNode = 8
	aliasedByte = 1
	// maxDepth is the maximum depth that the parser allows in text. A deeper value contains itself, by an alias.
	maxDepth = 10_000
	// reliableNodes is the number of values up to which an error of the decoder means that the text is invalid. After more
	// values, the error can come from the decoder's own limit of aliases.
	reliableNodes = 50_000
)

// countAliases returns what the aliases in YAML add to CountNodes: they are decoded like copies of the values with the
// anchors. The parser has no limit for the size of the copies, so that an object of 1 MiB could need 50 GiB of memory.
// It ignores documents with more than limit values.
func countAliases(stream []byte, limit int) (nodes int) {
	isUTF16 := bytes.Contains(stream, []byte("\xff\xfe")) || bytes.Contains(stream, []byte("\xfe\xff"))
	if !isUTF16 && (!hasNameAfter(stream, '*') || !hasNameAfter(stream, '&')) {
		return 0
	}
	found := documents(stream)
	if len(found) > 1 && (isUTF16 || hasDirective(stream)) {
		return maxStreamNodes + 1 // decoders do not agree where such a document begins
	}
	for _, doc := range found {
		if nodes <= maxStreamNodes && countIndicators(doc.text) <= limit {
			nodes += countAliasesOf(doc.text)
		}
	}
	return nodes
}

// hasNameAfter returns whether a name follows an indicator somewhere in text, as in anchors and aliases.
func hasNameAfter(text []byte, indicator byte) bool {
	for {
		at := bytes.IndexByte(text, indicator)
		if at < 0 || at+1 == len(text) {
			return false
		}
		if next := text[at+1]; isAlphanumeric(next) || next == '_' || next == '-' {
			return true
		}
		text = text[at+1:]
	}
}

// hasDirective returns whether a line of YAML can be a directive, which changes the document after the next separator.
func hasDirective(text []byte) bool {
	return bytes.HasPrefix(text, []byte("%")) || slices.ContainsFunc([]string{"\n", "\r", "\u0085", "\u2028", "\u2029"},
		func(lineBreak string) bool { return bytes.Contains(text, []byte(lineBreak+"%")) })
}

func countAliasesOf(document []byte) int {
	e := expansion{nodes: -2 * countIndicators(document), bytes: -len(document)} // only additions count
	var root yamlNode
	if goyaml.Unmarshal(document, &root) != nil {
		return 0 // it cannot be decoded
	}
	if e.add(root, 0); e.isFailed && e.visited > reliableNodes {
		return maxStreamNodes + 1
	}
	return e.count()
}

// expansion counts the values of a document and the bytes of their text, with those that aliases add.
type expansion struct {
	nodes, bytes int
	visited      int
	isFailed     bool
}

func (e *expansion) count() int {
	return max(0, e.nodes)*aliasedNode + max(0, e.bytes)*aliasedByte
}

// yamlNode is a value whose type is not known yet. decode is nil for null. It is a pointer to be comparable: keys of
// maps are such values, too.
type yamlNode struct{ decode *func(any) error }

// UnmarshalYAML implements yaml.Unmarshaler.
func (n *yamlNode) UnmarshalYAML(decode func(any) error) error {
	n.decode = &decode
	return nil
}

// add counts a value and those in it. It continues after an error, because the decoder can report it after it has
// decoded all other values.
func (e *expansion) add(node yamlNode, depth int) {
	e.nodes, e.visited = e.nodes+1, e.visited+1
	if depth > maxDepth {
		e.nodes = maxStreamNodes
	}
	if node.decode == nil || e.count() > maxStreamNodes {
		return
	}
	var text string
	var list []yamlNode
	var fields map[yamlNode]yamlNode
	for _, into := range []any{&text, &list, &fields} {
		err := (*node.decode)(into)
		if err == nil {
			break
		}
		if _, isOfOtherType := errors.AsType[*goyaml.TypeError](err); !isOfOtherType {
			e.isFailed = true
			break
		}
	}
	e.bytes += len(text)
	for _, item := range list {
		e.add(item, depth+1)
	}
	for key, value := range fields {
		e.add(key, depth+1)
		e.add(value, depth+1)
	}
}
