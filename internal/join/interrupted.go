package join

import (
	"context"
	"errors"
	"fmt"
	"regexp"
)

// interruption is the error of a registration that was interrupted, after which everything is as it was.
type interruption struct {
	// doing is what was interrupted.
	doing string
	// cause is the error of the context.
	cause error
}

// Error says what was interrupted, without what a request says of itself.
func (i *interruption) Error() string {
	return "interrupted while " + i.doing + "; everything was taken back"
}

// Unwrap returns the error of the context.
func (i *interruption) Unwrap() error { return i.cause }

// Step returns what err says that was being done, without what a request that was cut off says of itself. Only its
// first line counts.
func Step(err error) string {
	return regexp.MustCompile(`(?s)(: ((Get|Post|Put|Patch|Delete) "|client rate limiter|context canceled|context deadline)|\n).*`).ReplaceAllString(err.Error(), "")
}

// failed returns the error of a registration of r that failed with err and was undone, undone being what went wrong
// with that.
func failed(ctx context.Context, r Request, err, undone error) error {
	if ctx.Err() != nil && undone == nil {
		return &interruption{doing: Step(fmt.Errorf("registering cluster %s: %w", r.key(), err)), cause: ctx.Err()}
	}
	return errors.Join(fmt.Errorf("register cluster %s: %w", r.key(), err), undone)
}

// alsoUndone adds to an error of failed what went wrong with undoing more.
func alsoUndone(err, undone error) error {
	var stopped *interruption
	if errors.As(err, &stopped) && undone != nil {
		err = fmt.Errorf("%s: %w", stopped.doing, stopped.cause)
	}
	return errors.Join(err, undone)
}
