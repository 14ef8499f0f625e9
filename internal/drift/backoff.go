package drift

import (
	"time"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const (
	// minBackoff and maxBackoff are the first and the longest pause before a failed run is retried.
	minBackoff = time.Second
	maxBackoff = 5 * time.Minute
	// immediateCorrections is the number of consecutive corrections of an object without a delay.
	immediateCorrections = 3
	// quietPeriod is the time without drift after which an object is corrected without a delay again.
	quietPeriod = 10 * time.Minute
)

// Backoff returns the pause before the next attempt after the given number of consecutive failures: 1 s for zero
// failures, doubled by each failure, at most 5 minutes.
func Backoff(failures int) time.Duration {
	return min(minBackoff<<min(failures, 10), maxBackoff)
}

// objectKey identifies an object of a bundle.
type objectKey struct {
	id  bundle.ID
	key kube.Ref
}

// objectBackoff has the number of recent corrections of an object, and the time of the last one.
type objectBackoff struct {
	corrections int
	last        time.Time
}

// pause returns the time until the object may be corrected again; zero or less means now.
func (b objectBackoff) pause(now time.Time) time.Duration {
	if b.corrections < immediateCorrections {
		return 0
	}
	return Backoff(b.corrections-immediateCorrections) - now.Sub(b.last)
}
