package phase

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Step is one named part of a reconcile over the state S, which earlier steps fill for later ones.
type Step[S any] struct {
	Name string
	Run  func(ctx context.Context, state S) error
}

// Wait ends a reconcile that has nothing to do yet. After is the longest time until the next look; zero means that a watch will wake it.
type Wait struct {
	After  time.Duration
	Reason string
}

// Error returns the reason, so that a Wait can travel as an error.
func (w Wait) Error() string { return w.Reason }

// Invalid ends a reconcile that only the user can cure: it is not tried again until an input changes.
type Invalid struct{ Err error }

// Error returns the text of the wrapped error.
func (i Invalid) Error() string { return i.Err.Error() }

// Unwrap returns the wrapped error.
func (i Invalid) Unwrap() error { return i.Err }

// Invalidf returns an Invalid with a formatted message; %w works.
func Invalidf(format string, args ...any) error { return Invalid{Err: fmt.Errorf(format, args...)} }

// Kind tells the four ways in which a reconcile can end apart.
type Kind string

// The kinds of outcome.
const (
	Done      Kind = "Done"      // every step returned nil
	Waiting   Kind = "Waiting"   // a step returned Wait
	Rejected  Kind = "Rejected"  // a step returned Invalid
	Retriable Kind = "Retriable" // a step returned any other error
)

// Outcome is the one end of a reconcile: its kind, the step that ended it ("" when Done) and that step's error.
type Outcome struct {
	Kind Kind
	Step string
	Err  error
	// After is the Wait's longest time until the next look.
	After time.Duration
}

// Message returns the outcome's text for people, "" when Done.
func (o Outcome) Message() string {
	if o.Err == nil {
		return ""
	}
	return o.Err.Error()
}

// Run runs the steps in order until one returns an error, and says how it ended.
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
	var invalid Invalid
	if errors.As(err, &invalid) {
		return Outcome{Kind: Rejected, Step: step, Err: err}
	}
	return Outcome{Kind: Retriable, Step: step, Err: err}
}
