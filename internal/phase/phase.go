package phase

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Step is one named step of a reconcile. All steps get the same state: earlier steps set fields for later ones.
type Step[S any] struct {
	Name string
	Run  func(ctx context.Context, state S) error
}

// Wait is the error of a step that must wait. After is the maximum time until the next reconcile; zero means that only
// a watch triggers it. Reason names the awaited object or event.
type Wait struct {
	After  time.Duration
	Reason string
}

// Error returns the reason.
func (w Wait) Error() string { return w.Reason }

// TerminalError is an error that only the user can correct. The reconcile is not retried until an input changes.
type TerminalError struct{ Err error }

// Error returns the text of the wrapped error.
func (e TerminalError) Error() string { return e.Err.Error() }

// Unwrap returns the wrapped error.
func (e TerminalError) Unwrap() error { return e.Err }

// TerminalErrorf returns a TerminalError with a formatted message. The format may contain %w.
func TerminalErrorf(format string, args ...any) error {
	return TerminalError{Err: fmt.Errorf(format, args...)}
}

// Kind is the kind of an Outcome.
type Kind string

// The kinds of outcome.
const (
	Done      Kind = "Done"      // every step returned nil
	Waiting   Kind = "Waiting"   // a step returned Wait
	Terminal  Kind = "Terminal"  // a step returned TerminalError
	Retriable Kind = "Retriable" // a step returned any other error
)

// Outcome is the result of a reconcile: its kind, the last step ("" if Done) and the error of this step.
type Outcome struct {
	Kind Kind
	Step string
	Err  error
	// After is Wait.After, zero if the kind is not Waiting.
	After time.Duration
}

// Message returns the text of the error, "" if Done.
func (o Outcome) Message() string {
	if o.Err == nil {
		return ""
	}
	return o.Err.Error()
}

// Run runs the steps in order until one returns an error. It finds a Wait or TerminalError also in a wrapped error.
func Run[S any](ctx context.Context, state S, steps []Step[S]) Outcome {
	for _, step := range steps {
		if err := step.Run(ctx, state); err != nil {
			return outcomeOf(step.Name, err)
		}
	}
	return Outcome{Kind: Done}
}

func outcomeOf(step string, err error) Outcome {
	var wait Wait
	if errors.As(err, &wait) {
		return Outcome{Kind: Waiting, Step: step, Err: err, After: wait.After}
	}
	var terminal TerminalError
	if errors.As(err, &terminal) {
		return Outcome{Kind: Terminal, Step: step, Err: err}
	}
	return Outcome{Kind: Retriable, Step: step, Err: err}
}
