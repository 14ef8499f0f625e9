package kube

import (
	"errors"
	"io"
	"math"
	"strings"
	"sync/atomic"
)

// Budget limits the bytes and the JSON values that are read of one response, or of several responses together. With a
// limit of values, it refuses Protobuf, in which values cannot be counted. It is safe for concurrent use.
// ResponseMemory limits the memory of responses instead.
type Budget struct {
	bytes, values atomic.Int64
	limitsValues  bool
	exceeded      error
}

// protobufPrefix begins each object of Kubernetes in Protobuf. No JSON begins with its first byte.
const protobufPrefix = "k8s\x00"

var errProtobuf = errors.New("the cluster returned Protobuf, which was not requested")

// NewBudget returns a budget of bytes and values; math.MaxInt64 means no limit of values. Reads beyond the budget
// return exceeded.
func NewBudget(bytes, values int64, exceeded error) *Budget {
	b := &Budget{exceeded: exceeded, limitsValues: values < math.MaxInt64}
	b.bytes.Store(bytes)
	b.values.Store(values)
	return b
}

// LimitBody returns a body of a response that returns exceeded when more than limit bytes are read.
func LimitBody(body io.ReadCloser, limit int64, exceeded error) io.ReadCloser {
	return NewBudget(limit, math.MaxInt64, exceeded).Limit(body)
}

// Limit returns a body of a response that uses up the budget.
func (b *Budget) Limit(body io.ReadCloser) io.ReadCloser { return &limitedBody{body: body, budget: b} }

// Err returns the error of reads that went beyond the budget, or nil if there was none.
func (b *Budget) Err() error {
	if b.bytes.Load() < 0 || b.values.Load() < 0 {
		return b.exceeded
	}
	return nil
}

type limitedBody struct {
	body      io.ReadCloser
	budget    *Budget
	isStarted bool // after the first byte
	scanner   jsonScanner
}

// Read implements io.Reader.
func (b *limitedBody) Read(p []byte) (int, error) {
	left := max(0, b.budget.bytes.Load())
	if int64(len(p))-1 > left {
		p = p[:left+1]
	}
	n, err := b.body.Read(p)
	b.budget.bytes.Add(-int64(n))
	if n > 0 && !b.isStarted {
		b.isStarted = true
		if b.budget.limitsValues && p[0] == protobufPrefix[0] {
			return 0, errProtobuf
		}
	}
	before := b.scanner.values()
	b.scanner.scan(p[:n])
	b.budget.values.Add(before - b.scanner.values())
	if b.budget.Err() != nil {
		return int(min(int64(n), left)), b.budget.exceeded
	}
	return n, err
}

// jsonCounts counts the characters, outside of strings, with which a field of an object or an element of an array can
// begin.
type jsonCounts struct {
	objects  int64 // opening brackets of objects
	arrays   int64 // opening brackets of arrays
	fields   int64 // commas in objects
	items    int64 // commas in arrays that are a field of the object, such as the items of a list
	elements int64 // commas in other arrays
}

// jsonScanner scans JSON in parts, without decoding it. "The object" is the outermost object or, in an event of a
// watch, the object of the event.
type jsonScanner struct {
	// all counts the characters of all levels, shallow only those of the first maxMetadataDepth levels.
	all, shallow jsonCounts

	// isEvent is true for events of a watch, which have the object in a field: the object then is at depth 2.
	isEvent bool
	// hasKind and hasVersion are true if the object has the fields kind and apiVersion.
	hasKind, hasVersion bool
	// hasAmbiguousField is true if decoders can disagree on the kind or apiVersion: the name of the field has another case
	// or escapes, or the value has escapes, is no text, or can be read as empty.
	hasAmbiguousField bool
	// hasBuiltinKind is true if a kind of the object is a kind of client-go. hasOtherKind is true if a kind is neither of
	// client-go nor PartialObjectMetadata or its list. Of several kind fields, decoders use the last.
	hasBuiltinKind, hasOtherKind bool

	// depth is the number of objects and arrays around the current character. For each such depth, its arrayBit is set in
	// arrayBits if an array begins there, and not if an object does.
	depth               int
	arrayBits           uint64
	inString, isEscaped bool
	// hasEscape is true if the current string has an escape.
	hasEscape bool
	// text is the start of the current string if it is at objectDepth.
	text []byte
	// field is the name of the current field if it is kind or apiVersion and its text has not ended yet, else "".
	field string
	// last is the last character of the current string.
	last byte
}

// These are the fields that each object and list of Kubernetes has.
const (
	fieldKind    = "kind"
	fieldVersion = "apiVersion"
)

// maxText limits text. Each kind is shorter, and each name of a field that encoding/json reads as apiVersion.
const maxText = maxKindName + 1

// maxMetadataDepth is the depth of the entries of metadata.managedFields in a list. Deeper values of metadata are not
// decoded.
const maxMetadataDepth = 6

// objectDepth returns the depth in the object.
func (s *jsonScanner) objectDepth() int {
	if s.isEvent {
		return 2
	}
	return 1
}

// scan scans the next part.
func (s *jsonScanner) scan(part []byte) {
	for len(part) > 0 {
		part = part[s.scanValue(part):]
	}
}

// scanValue scans a part to the end of the outermost object or array, or to the end of the part, and returns the number
// of scanned characters.
func (s *jsonScanner) scanValue(part []byte) int {
	for i, c := range part {
		switch {
		case s.inString:
			s.scanString(c)
		case c == '"':
			s.inString, s.hasEscape, s.text, s.last = true, false, s.text[:0], 0
		case c == '{' || c == '[':
			s.begin(c == '[')
		case c == '}' || c == ']':
			s.depth--
			s.endField()
			if s.depth <= 0 {
				return i + 1
			}
		case c == ',':
			s.countComma()
			s.endField()
		case c == ':' && s.depth == s.objectDepth():
			s.beginField()
		}
	}
	return len(part)
}

// isAtEnd returns whether the outermost object or array has ended with the last scanned character.
func (s *jsonScanner) isAtEnd(last byte) bool {
	return (last == '}' || last == ']') && !s.inString && s.depth <= 0
}

// arrayBit returns the bit of a depth in arrayBits. All depths from 63 on share the last bit.
func arrayBit(depth int) uint64 { return 1 << uint(max(0, min(depth, 63))) }

// begin begins an object or an array.
func (s *jsonScanner) begin(isArray bool) {
	one := jsonCounts{objects: 1}
	if isArray {
		one = jsonCounts{arrays: 1}
	}
	s.count(one)
	s.depth++
	if isArray {
		s.arrayBits |= arrayBit(s.depth)
	} else {
		s.arrayBits &^= arrayBit(s.depth)
	}
}

func (s *jsonScanner) countComma() {
	switch {
	case s.arrayBits&arrayBit(s.depth) == 0:
		s.count(jsonCounts{fields: 1})
	case s.depth == s.objectDepth()+1:
		s.count(jsonCounts{items: 1})
	default:
		s.count(jsonCounts{elements: 1})
	}
}

// count adds a character at the current depth.
func (s *jsonScanner) count(one jsonCounts) {
	s.all.add(one)
	if s.depth <= maxMetadataDepth {
		s.shallow.add(one)
	}
}

func (c *jsonCounts) add(other jsonCounts) {
	c.objects += other.objects
	c.arrays += other.arrays
	c.fields += other.fields
	c.items += other.items
	c.elements += other.elements
}

// values returns the estimated number of values.
func (s *jsonScanner) values() int64 {
	return s.all.objects + s.all.arrays + s.all.fields + s.all.items + s.all.elements
}

// scanString scans a character in a string.
func (s *jsonScanner) scanString(c byte) {
	switch {
	case s.isEscaped:
		s.isEscaped = false
	case c == '"':
		s.inString = false
		s.endText()
		return
	case c == '\\':
		s.isEscaped, s.hasEscape = true, true
	}
	s.last = c
	if s.depth == s.objectDepth() && len(s.text) < maxText {
		s.text = append(s.text, c)
	}
}

// beginField reads the name of a field of the object. Decoders ignore its case, and decode escapes.
func (s *jsonScanner) beginField() {
	switch name := string(s.text); {
	case name == fieldKind || name == fieldVersion:
		s.field = name
		s.hasKind = s.hasKind || name == fieldKind
		s.hasVersion = s.hasVersion || name == fieldVersion
	case strings.EqualFold(name, fieldKind) || strings.EqualFold(name, fieldVersion) || s.hasEscape:
		s.hasAmbiguousField = true
	}
}

// endText ends a string. A kind or an apiVersion is ambiguous if a decoder can read it as empty, as the version in
// "v1/", or if it has escapes, which are not decoded here.
func (s *jsonScanner) endText() {
	if s.field == "" || s.depth != s.objectDepth() {
		return
	}
	s.hasAmbiguousField = s.hasAmbiguousField || s.last == 0 || s.last == '/' || s.hasEscape
	if s.field == fieldKind {
		s.addKind(string(s.text))
	}
	s.field = ""
}

// endField ends a field. If field is still set, the value of the kind or the apiVersion is no text.
func (s *jsonScanner) endField() {
	s.hasAmbiguousField = s.hasAmbiguousField || s.field != ""
	s.field = ""
}

// addKind records a kind of the object.
func (s *jsonScanner) addKind(kind string) {
	switch {
	case builtinKinds()[kind]:
		s.hasBuiltinKind = true
	case kind != "PartialObjectMetadata" && kind != "PartialObjectMetadataList":
		s.hasOtherKind = true
	}
}

// hasType returns whether each decoder finds a kind and an apiVersion in the scanned object.
func (s *jsonScanner) hasType() bool { return s.hasKind && s.hasVersion && !s.hasAmbiguousField }

// Close closes the body.
func (b *limitedBody) Close() error { return b.body.Close() }

// errNoObject is the error for a response that is no object of Kubernetes. client-go would quote the response in its
// error.
var errNoObject = errors.New("the server returned something other than an object of Kubernetes")

// RequireObject returns a body that fails at its end if it lacks the field kind or apiVersion, or if one is empty:
// client-go quotes such a body in its error. It accepts invalid JSON, of which the error of client-go quotes one
// character.
func RequireObject(body io.ReadCloser) io.ReadCloser { return &objectBody{ReadCloser: body} }

type objectBody struct {
	io.ReadCloser
	isStarted bool // after the first byte
	scanner   jsonScanner
}

// Read implements io.Reader.
func (b *objectBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.isStarted = b.isStarted || n > 0
	b.scanner.scan(p[:n])
	if err == io.EOF && b.isStarted && !b.scanner.hasType() {
		return 0, errNoObject
	}
	return n, err
}
