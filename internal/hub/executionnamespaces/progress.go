package executionnamespaces

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// progressTracker tracks how long the removals of Clusters have made no progress. It is only in memory: after a restart
// of the hub, the timeouts start again. The zero value is ready to use.
type progressTracker struct {
	// mu guards clusters.
	mu       sync.Mutex
	clusters map[types.UID]*progress
}

// progress is the progress of one removal.
type progress struct {
	pending      string // the pending work
	pendingSince time.Time
	event        string // the text of the last event
}

// getOrCreate returns the progress of a Cluster. The caller holds mu.
func (p *progressTracker) getOrCreate(cluster types.UID) *progress {
	if p.clusters == nil {
		p.clusters = map[types.UID]*progress{}
	}
	if p.clusters[cluster] == nil {
		p.clusters[cluster] = &progress{}
	}
	return p.clusters[cluster]
}

// recordPending records the pending work, and returns the time since its last change.
func (p *progressTracker) recordPending(cluster types.UID, pendingWork string, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	current := p.getOrCreate(cluster)
	if current.pending != pendingWork {
		current.pending, current.pendingSince = pendingWork, now
	}
	return now.Sub(current.pendingSince)
}

// recordEvent records the text of an event and returns whether it differs from the last one.
func (p *progressTracker) recordEvent(cluster types.UID, text string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	current := p.getOrCreate(cluster)
	defer func() { current.event = text }()
	return current.event != text
}

// remove deletes the progress of a Cluster.
func (p *progressTracker) remove(cluster types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.clusters, cluster)
}
