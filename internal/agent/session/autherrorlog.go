package session

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// LogInterval is the minimal time between two log messages about one outage.
const LogInterval = 5 * time.Minute

// AuthErrorLog logs that the hub rejects the agent's credential: once when that begins, and at LogInterval while it
// lasts.
type AuthErrorLog struct {
	// Clock gives the current time.
	Clock clock.PassiveClock
	// Message is the log message. Default: a message that the hub refuses the credential.
	Message string
	// Repair is the command that repairs the credential.
	Repair string
	// IsRejected returns true if an error means that the hub rejects the credential.
	IsRejected func(error) bool

	// mu guards lastLogged.
	mu sync.Mutex
	// lastLogged is the time of the last message about the current outage; zero without an outage.
	lastLogged time.Time
}

// LogIfRejected returns true if err means that the hub rejects the credential, and logs that at most every LogInterval.
func (l *AuthErrorLog) LogIfRejected(ctx context.Context, err error) bool {
	return l.logIfRejected(log.FromContext(ctx), err)
}

func (l *AuthErrorLog) logIfRejected(logger logr.Logger, err error) bool {
	if err == nil || !l.IsRejected(err) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := l.Clock.Now(); l.lastLogged.IsZero() || now.Sub(l.lastLogged) >= LogInterval {
		l.lastLogged = now
		// The error is a value and not the error of the line: logger may be a filteredSink, which would pass a line with
		// this error to logIfRejected again, while mu is locked.
		message := cmp.Or(l.Message, "the hub refuses the agent's credential; deployed objects stay, and drift is corrected")
		logger.Error(nil, message, "repair", l.Repair, "reason", err.Error())
	}
	return true
}

// Reset records that the hub accepts the credential.
func (l *AuthErrorLog) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastLogged = time.Time{}
}

// WithFilteredLog returns ctx with a log that drops the errors of rejected requests and calls LogIfRejected instead. A
// watch would log several of them per second.
func (l *AuthErrorLog) WithFilteredLog(ctx context.Context) context.Context {
	logger := log.FromContext(ctx)
	return log.IntoContext(ctx, logger.WithSink(filteredSink{logger.GetSink(), l, logger}))
}

// filteredSink is a log without the errors of rejected requests.
type filteredSink struct {
	logr.LogSink
	authErrors *AuthErrorLog
	// unfiltered is the log with all errors.
	unfiltered logr.Logger
}

var _ logr.CallDepthLogSink = filteredSink{}

// Error logs err, unless it is the error of a rejected request.
func (h filteredSink) Error(err error, message string, keysAndValues ...any) {
	if !h.authErrors.logIfRejected(h.unfiltered, err) {
		h.LogSink.Error(err, message, keysAndValues...)
	}
}

// WithValues returns a log with more values.
func (h filteredSink) WithValues(keysAndValues ...any) logr.LogSink {
	return filteredSink{h.LogSink.WithValues(keysAndValues...), h.authErrors, h.unfiltered}
}

// WithName returns a log with that name.
func (h filteredSink) WithName(name string) logr.LogSink {
	return filteredSink{h.LogSink.WithName(name), h.authErrors, h.unfiltered}
}

// WithCallDepth returns a log that skips more callers.
func (h filteredSink) WithCallDepth(depth int) logr.LogSink {
	if sink, ok := h.LogSink.(logr.CallDepthLogSink); ok {
		return filteredSink{sink.WithCallDepth(depth), h.authErrors, h.unfiltered}
	}
	return h
}
