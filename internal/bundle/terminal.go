package bundle

// TerminalError is the error of a failed run that the caller must not repeat: either only another bundle can succeed,
// or the engine repeats the run itself and reports the result. The report of the run has the state Failed.
type TerminalError struct{ Err error }

// Error returns the text of the wrapped error.
func (e *TerminalError) Error() string { return e.Err.Error() }

// Unwrap returns the wrapped error.
func (e *TerminalError) Unwrap() error { return e.Err }
