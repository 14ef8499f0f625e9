package kube

import (
	"bytes"
	"errors"
	"slices"

	goyaml "go.yaml.in/yaml/v2"
)

const (
	// Each value that an alias adds increases the count by aliasedValue, and each byte of its text by aliasedByte. So
	// maxDocumentValues allows 125,000 such values, or 1 MiB of such text. API servers do not store much larger objects.
	aliasedValue = 8
	aliasedByte  = 1
	// maxDepth is the maximum depth that the parser allows in text. A deeper value contains itself, by an alias.
	maxDepth = 10_000
	// reliableValues is the number of values up to which an error of the decoder means that the text is invalid. After
	// more values, the error can come from the decoder's own limit of aliases.
	reliableValues = 50_000
)

// countAliases returns the count that the aliases in YAML add to CountValues, see aliasedValue: each alias is decoded
// as a copy of the value with the anchor. The parser does not limit the copies, so an object of 1 MiB could need 50 GiB
// of memory. countAliases ignores documents with more than limit values.
func countAliases(stream []byte, limit int) (values int) {
	isUTF16 := bytes.Contains(stream, []byte("\xff\xfe")) || bytes.Contains(stream, []byte("\xfe\xff"))
	if !isUTF16 && (!hasNameAfter(stream, '*') || !hasNameAfter(stream, '&')) {
		return 0
	}
	found := splitDocuments(stream)
	if len(found) > 1 && (isUTF16 || hasDirective(stream)) {
		return maxStreamValues + 1 // decoders do not agree where such a document begins
	}
	for _, doc := range found {
		if values <= maxStreamValues && countIndicators(doc.text) <= limit {
			values += countAliasesInDocument(doc.text)
		}
	}
	return values
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

// countAliasesInDocument is countAliases for one document. It returns 0 if the document cannot be decoded.
func countAliasesInDocument(document []byte) int {
	e := expandedSize{values: -2 * countIndicators(document), bytes: -len(document)}
	var root yamlNode
	if goyaml.Unmarshal(document, &root) != nil {
		return 0
	}
	if e.add(root, 0); e.isFailed && e.visited > reliableValues {
		return maxStreamValues + 1
	}
	return e.count()
}

// expandedSize counts the values of a document and the bytes of their text, including the copies of aliases. It starts
// at minus twice countIndicators, which can miss half of the values, so that only copies result in a positive count.
type expandedSize struct {
	values, bytes int
	visited       int
	isFailed      bool
}

func (e *expandedSize) count() int {
	return max(0, e.values)*aliasedValue + max(0, e.bytes)*aliasedByte
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
func (e *expandedSize) add(node yamlNode, depth int) {
	e.values, e.visited = e.values+1, e.visited+1
	if depth > maxDepth {
		e.values = maxStreamValues
	}
	if node.decode == nil || e.count() > maxStreamValues {
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
