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
	body   io.ReadCloser
	budget *Budget
	// isStarted is true after the first byte, and inString and isEscaped are the state of JSON after the bytes that were
	// read.
	isStarted, inString, isEscaped bool
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
	b.budget.values.Add(-b.countValues(p[:n]))
	if b.budget.Err() != nil {
		return int(min(int64(n), left)), b.budget.exceeded
	}
	return n, err
}

// countValues returns the number of characters outside of strings with which a JSON value can begin in an array, or a
// field in an object.
func (b *limitedBody) countValues(text []byte) (count int64) {
	for _, c := range text {
		switch {
		case b.isEscaped:
			b.isEscaped = false
		case b.inString:
			b.inString, b.isEscaped = c != '"', c == '\\'
		case c == '"':
			b.inString = true
		case c == '{' || c == '[' || c == ',':
			count++
		}
	}
	return count
}

// Close closes the body.
func (b *limitedBody) Close() error { return b.body.Close() }
