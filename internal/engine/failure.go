package engine

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/towline/towline/internal/kube"
)

// maxNamedFailures is the maximum number of failures in a message. The others are only counted.
const maxNamedFailures = 5

// objectError is the error of one object that could not be applied or removed.
type objectError struct {
	ref kube.Ref
	err error
}

// Error names the object and the reason. A conflict names the object itself.
func (e *objectError) Error() string {
	if errors.Is(e.err, ErrConflict) {
		return e.err.Error()
	}
	return fmt.Sprintf("%s: %v", e.ref, e.err)
}

// Unwrap returns the reason.
func (e *objectError) Unwrap() error { return e.err }

// applyErrors are the failures of a run, in the order of the objects.
type applyErrors []error

// Error names the first failures. It is the same for the same failures.
func (e applyErrors) Error() string {
	var texts []string
	for _, err := range e[:min(len(e), maxNamedFailures)] {
		texts = append(texts, err.Error())
	}
	text := strings.Join(texts, "; ")
	if more := len(e) - maxNamedFailures; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return text
}

// Unwrap returns all of them.
func (e applyErrors) Unwrap() []error { return e }

// isUnanswered returns whether a request got no response, so that others will get none either.
func isUnanswered(err error) bool {
	_, ok := errors.AsType[*url.Error](err)
	return ok
}
