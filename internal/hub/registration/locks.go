package registration

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// ClusterLocks has a lock for each cluster, so that only one controller at a time changes its registration. The zero
// value is ready for use.
type ClusterLocks struct {
	// mu guards locked. It is held only briefly.
	mu sync.Mutex
	// locked has a channel for each locked cluster. unlock closes it.
	locked map[types.NamespacedName]chan struct{}
}

// Lock waits until the cluster is unlocked, locks it, and returns the function that unlocks it. It returns the error of
// ctx if ctx ends before. The caller must then check whether the cluster is being deleted.
func (l *ClusterLocks) Lock(ctx context.Context, cluster types.NamespacedName) (unlock func(), err error) {
	for {
		unlocked := l.tryLock(cluster)
		if unlocked == nil {
			return func() { l.unlock(cluster) }, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-unlocked:
		}
	}
}

// tryLock locks the cluster and returns nil. If it is already locked, it returns the channel that its unlock closes.
func (l *ClusterLocks) tryLock(cluster types.NamespacedName) (unlocked <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if existing, ok := l.locked[cluster]; ok {
		return existing
	}
	if l.locked == nil {
		l.locked = map[types.NamespacedName]chan struct{}{}
	}
	l.locked[cluster] = make(chan struct{})
	return nil
}

func (l *ClusterLocks) unlock(cluster types.NamespacedName) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.locked[cluster])
	delete(l.locked, cluster)
}
