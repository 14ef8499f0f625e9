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
	// immediateCorrections is how often in a row an object is corrected without a pause.
	immediateCorrections = 3
	// quietPeriod is how long an object must not drift until it is corrected without a pause again.
	quietPeriod = 10 * time.Minute
)

// Backoff returns the pause before the next attempt after the given number of failures in a row: 1 s, doubled by each
// further failure, at most 5 minutes.
func Backoff(failures int) time.Duration {
	return min(minBackoff<<min(failures, 10), maxBackoff)
}

// objectKey is an object of a bundle.
type objectKey struct {
	id  bundle.ID
	key kube.Ref
}

// objectBackoff counts how often an object was corrected.
type objectBackoff struct {
	corrections int
	last        time.Time
}

// pause returns the time until the object may be corrected again.
func (b objectBackoff) pause(now time.Time) time.Duration {
	if b.corrections < immediateCorrections {
		return 0
	}
	return Backoff(b.corrections-immediateCorrections) - now.Sub(b.last)
}
