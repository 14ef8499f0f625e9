package engine

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/towline/towline/internal/kube"
)

// maxNamed is how many failures a message names before it only counts.
const maxNamed = 5

// objectError is why one object could not be made right.
type objectError struct {
	ref kube.Ref
	err error
}

// Error names the object and the reason, except where the reason names the object itself.
func (e *objectError) Error() string {
	if errors.Is(e.err, ErrConflict) {
		return e.err.Error()
	}
	return fmt.Sprintf("%s: %v", e.ref, e.err)
}

// Unwrap returns the reason.
func (e *objectError) Unwrap() error { return e.err }

// applyErrors is why a run did not reach its end: one or more objects, in order.
type applyErrors []error

// Error names the first few. It is the same for the same failures.
func (e applyErrors) Error() string {
	var texts []string
	for _, err := range e[:min(len(e), maxNamed)] {
		texts = append(texts, err.Error())
	}
	text := strings.Join(texts, "; ")
	if more := len(e) - maxNamed; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return text
}

// Unwrap returns all of them.
func (e applyErrors) Unwrap() []error { return e }

// isUnanswered returns whether err is that of a request that got no answer: neither will others.
func isUnanswered(err error) bool {
	_, ok := errors.AsType[*url.Error](err)
	return ok
}
