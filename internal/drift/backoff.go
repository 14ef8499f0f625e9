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

// Backoff returns the pause after a failure: 1 s, doubled for each earlier consecutive failure, at most 5 minutes.
func Backoff(earlierFailures int) time.Duration {
	return min(minBackoff<<min(earlierFailures, 10), MaxBackoff)
}

// objectKey identifies an object of a bundle.
type objectKey struct {
	id  bundle.ID
	key kube.Ref
}

// objectBackoff delays the corrections of one object.
type objectBackoff struct {
	corrections int       // successful corrections since the last quietPeriod without drift
	failures    int       // attempts that failed in a row
	last        time.Time // the last correction or attempt
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

// orZeroIfOver returns b, or a zero objectBackoff if b is over.
func (b objectBackoff) orZeroIfOver(now time.Time) objectBackoff {
	if b.isOver(now) {
		return objectBackoff{}
	}
	return b
}
