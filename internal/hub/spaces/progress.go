package spaces

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// progressTracker tracks how long the removals of Clusters have made no progress. It is in memory: after a restart of
// the hub, the timeouts start again. The zero value is ready.
type progressTracker struct {
	// mu guards clusters.
	mu       sync.Mutex
	clusters map[types.UID]*progress
}

// progress is the progress of one removal.
type progress struct {
	pending      string
	pendingSince time.Time
	event        string
}

func (p *progressTracker) forCluster(cluster types.UID) *progress {
	if p.clusters == nil {
		p.clusters = map[types.UID]*progress{}
	}
	if p.clusters[cluster] == nil {
		p.clusters[cluster] = &progress{}
	}
	return p.clusters[cluster]
}

// recordPending records the pending work and returns how long it has not changed.
func (p *progressTracker) recordPending(cluster types.UID, remaining string, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.forCluster(cluster)
	if v.pending != remaining {
		v.pending, v.pendingSince = remaining, now
	}
	return now.Sub(v.pendingSince)
}

// recordEvent records the text of an event and returns whether it differs from the last one.
func (p *progressTracker) recordEvent(cluster types.UID, text string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.forCluster(cluster)
	defer func() { v.event = text }()
	return v.event != text
}

// remove removes a Cluster.
func (p *progressTracker) remove(cluster types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.clusters, cluster)
}
