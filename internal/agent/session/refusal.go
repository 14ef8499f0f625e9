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

// TellInterval is the least time between two messages about one outage.
const TellInterval = 5 * time.Minute

// Refusal tells people what to do about a hub that refuses the agent's credential: when that begins, and now and then while it lasts.
type Refusal struct {
	// Clock tells the time.
	Clock clock.PassiveClock
	// Message says what is wrong. Default: that the hub refuses the agent's credential.
	Message string
	// Repair is what to run.
	Repair string
	// Refused says whether an error means that the hub refuses the credential.
	Refused func(error) bool

	// mu guards said.
	mu sync.Mutex
	// said is when the last message about the outage was; zero if there is no outage.
	said time.Time
}

// Is says whether err means that the hub refuses the credential, and then tells people.
func (r *Refusal) Is(ctx context.Context, err error) bool {
	return r.takes(log.FromContext(ctx), err)
}

func (r *Refusal) takes(logger logr.Logger, err error) bool {
	if err == nil || !r.Refused(err) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := r.Clock.Now(); r.said.IsZero() || now.Sub(r.said) >= TellInterval {
		r.said = now
		// The error is told as a fact: errors of this kind are what a hushed log leaves out.
		message := cmp.Or(r.Message, "the hub refuses the agent's credential; what is deployed stays and is healed")
		logger.Error(nil, message, "repair", r.Repair, "reason", err.Error())
	}
	return true
}

// Over says that the hub accepts the credential.
func (r *Refusal) Over() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = time.Time{}
}

// Hush returns ctx with a log that tells of refused requests as r does, and not of each: a watch tries again several times a second at first.
func (r *Refusal) Hush(ctx context.Context) context.Context {
	logger := log.FromContext(ctx)
	return log.IntoContext(ctx, logger.WithSink(hushed{logger.GetSink(), r, logger}))
}

// hushed is a log without the errors of requests that the hub refuses.
type hushed struct {
	logr.LogSink
	refusal *Refusal
	// whole is the log with everything.
	whole logr.Logger
}

var _ logr.CallDepthLogSink = hushed{}

// Error writes the error, unless it is one of a refused request.
func (h hushed) Error(err error, message string, facts ...any) {
	if !h.refusal.takes(h.whole, err) {
		h.LogSink.Error(err, message, facts...)
	}
}

// WithValues returns a log with more facts on every line.
func (h hushed) WithValues(facts ...any) logr.LogSink {
	return hushed{h.LogSink.WithValues(facts...), h.refusal, h.whole}
}

// WithName returns a log of that name.
func (h hushed) WithName(name string) logr.LogSink {
	return hushed{h.LogSink.WithName(name), h.refusal, h.whole}
}

// WithCallDepth returns a log that names a caller further up.
func (h hushed) WithCallDepth(depth int) logr.LogSink {
	if deep, ok := h.LogSink.(logr.CallDepthLogSink); ok {
		return hushed{deep.WithCallDepth(depth), h.refusal, h.whole}
	}
	return h
}
