package summaries

import (
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// startDelay is the time until the status of a summary on a pull member becomes Provisioning. Most agents report the
// result before, and the result is the only write then.
const startDelay = 2 * time.Second

// deliveryStarts has the time since when the status of a summary is behind the start of its delivery. The zero value
// has no summaries.
type deliveryStarts struct {
	// mu guards since.
	mu    sync.Mutex
	since map[client.ObjectKey]time.Time
}

// remaining returns the time until the status must be written. The first call for a summary returns startDelay.
func (d *deliveryStarts) remaining(summary client.ObjectKey, now time.Time) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.since == nil {
		d.since = map[client.ObjectKey]time.Time{}
	}
	since, ok := d.since[summary]
	if !ok {
		since = now
		d.since[summary] = now
	}
	return since.Add(startDelay).Sub(now)
}

// forget removes a summary.
func (d *deliveryStarts) forget(summary client.ObjectKey) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.since, summary)
}
