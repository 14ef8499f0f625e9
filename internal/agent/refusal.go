package agent

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/join"
)

// refusalInterval is the least time between two messages about one outage.
const refusalInterval = 5 * time.Minute

// refusal tells people what to do about a hub that refuses the agent's credential: when that begins, and now and then while it lasts.
type refusal struct {
	clock  clock.PassiveClock
	repair string

	// mu guards said.
	mu sync.Mutex
	// said is when the last message about the outage was; zero if there is no outage.
	said time.Time
}

// is says whether err means that the hub refuses the credential, and then tells people.
func (r *refusal) is(ctx context.Context, err error) bool {
	return r.takes(log.FromContext(ctx), err)
}

func (r *refusal) takes(logger logr.Logger, err error) bool {
	if !errors.Is(err, join.ErrRefused) && !apierrors.IsUnauthorized(err) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := r.clock.Now(); r.said.IsZero() || now.Sub(r.said) >= refusalInterval {
		r.said = now
		// The error is told as a fact: errors of this kind are what a hushed log leaves out.
		logger.Error(nil, "the hub refuses the agent's credential; what is deployed stays and is healed", "repair", r.repair, "reason", err.Error())
	}
	return true
}

// over says that the hub accepts the credential.
func (r *refusal) over() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = time.Time{}
}

// hush returns ctx with a log that tells of refused requests as r does, and not of each: a watch tries again several times a second at first.
func (r *refusal) hush(ctx context.Context) context.Context {
	logger := log.FromContext(ctx)
	return log.IntoContext(ctx, logger.WithSink(hushed{logger.GetSink(), r, logger}))
}

// hushed is a log without the errors of requests that the hub refuses.
type hushed struct {
	logr.LogSink
	refusal *refusal
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
