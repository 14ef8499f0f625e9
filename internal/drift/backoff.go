package drift

import (
	"time"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const (
	// minBackoff is the first pause before a failed run is retried.
	minBackoff = time.Second
	// MaxBackoff is the longest pause before a failed run is retried.
	MaxBackoff = 5 * time.Minute
	// immediateCorrections is the number of consecutive corrections of an object without a delay.
	immediateCorrections = 3
	// quietPeriod is the time without drift after which an object is corrected without a delay again.
	quietPeriod = 10 * time.Minute
)

// Backoff returns the pause before the next attempt after the given number of consecutive failures: 1 s for zero
// failures, doubled by each failure, at most 5 minutes.
func Backoff(failures int) time.Duration {
	return min(minBackoff<<min(failures, 10), MaxBackoff)
}

// objectKey identifies an object of a bundle.
type objectKey struct {
	id  bundle.ID
	key kube.Ref
}

// objectBackoff has the number of recent corrections of an object, the number of attempts to correct it that failed in
// a row, and the time of the last correction or attempt.
type objectBackoff struct {
	corrections int
	failures    int
	last        time.Time
}

// pause returns the time until the object may be corrected again; zero or less means now.
func (b objectBackoff) pause(now time.Time) time.Duration {
	var pause time.Duration
	if b.corrections >= immediateCorrections {
		pause = Backoff(b.corrections - immediateCorrections)
	}
	if b.failures > 0 {
		pause = max(pause, Backoff(b.failures-1))
	}
	return pause - now.Sub(b.last)
}

// isOver returns whether the object has not drifted for quietPeriod.
func (b objectBackoff) isOver(now time.Time) bool { return now.Sub(b.last) > quietPeriod }

// unlessOver returns b, or a zero objectBackoff if b is over.
func (b objectBackoff) unlessOver(now time.Time) objectBackoff {
	if b.isOver(now) {
		return objectBackoff{}
	}
	return b
}
