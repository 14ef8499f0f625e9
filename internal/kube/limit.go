package kube

import (
	"errors"
	"io"
	"math"
	"sync/atomic"
)

// Budget limits what is read of one or several responses together: their bytes, and their JSON values. A value takes
// two bytes of JSON, and about a hundred bytes of memory when it is decoded. If there is a limit of values, Protobuf is
// refused, whose values are not counted. It is safe for concurrent use.
type Budget struct {
	bytes, values atomic.Int64
	limitsValues  bool
	exceeded      error
}

// protobufPrefix begins each object of Kubernetes in Protobuf. No JSON begins with its first byte.
const protobufPrefix = "k8s\x00"

var errProtobuf = errors.New("the cluster returned Protobuf, which was not requested")

// NewBudget returns a budget of bytes and values; math.MaxInt64 values are no limit of values. Reads that go beyond it
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
	if int64(len(p)) > left+1 {
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
	values := b.scanner.values
	b.scanner.scan(p[:n])
	b.budget.values.Add(values - b.scanner.values)
	if b.budget.Err() != nil {
		return int(min(int64(n), left)), b.budget.exceeded
	}
	return n, err
}

// jsonScanner scans JSON in parts, without decoding it.
type jsonScanner struct {
	// values counts the characters outside of strings with which a value can begin in an array, or a field in an object.
	values int64
	// hasKind and hasVersion are true if the outermost object has the fields kind and apiVersion.
	hasKind, hasVersion bool

	// depth is the number of objects and arrays around the current character.
	depth               int
	inString, isEscaped bool
	// text is the start of the current string, if it can be the name of a field of the outermost object.
	text []byte
}

// These are the fields that each object and list of Kubernetes has.
const (
	fieldKind    = "kind"
	fieldVersion = "apiVersion"
)

func (s *jsonScanner) scan(part []byte) {
	for _, c := range part {
		switch {
		case s.inString:
			s.scanString(c)
		case c == '"':
			s.inString, s.text = true, s.text[:0]
		case c == '{' || c == '[':
			s.values++
			s.depth++
		case c == '}' || c == ']':
			s.depth--
		case c == ',':
			s.values++
		case c == ':' && s.depth == 1:
			s.hasKind = s.hasKind || string(s.text) == fieldKind
			s.hasVersion = s.hasVersion || string(s.text) == fieldVersion
		}
	}
}

// scanString scans a character in a string.
func (s *jsonScanner) scanString(c byte) {
	switch {
	case s.isEscaped:
		s.isEscaped = false
	case c == '"':
		s.inString = false
		return
	case c == '\\':
		s.isEscaped = true
	}
	if len(s.text) <= len(fieldVersion) {
		s.text = append(s.text, c)
	}
}

// Close closes the body.
func (b *limitedBody) Close() error { return b.body.Close() }

// errNoObject is the error for a response that is no object of Kubernetes. The errors of client-go would have its text.
var errNoObject = errors.New("the server returned something other than an object of Kubernetes")

// RequireObject returns a body that fails at its end if it lacks the fields kind and apiVersion. client-go makes such a
// body a part of its error.
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
	if err == io.EOF && b.isStarted && (!b.scanner.hasKind || !b.scanner.hasVersion) {
		return 0, errNoObject
	}
	return n, err
}
