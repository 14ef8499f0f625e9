package registrations

import (
	"hash/fnv"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// ClusterLocks has a mutex for each cluster, so that only one controller at a time changes its registration. The zero
// value is ready.
type ClusterLocks struct {
	// Clusters with the same hash share a mutex, which can only delay them.
	locks [64]sync.Mutex
}

// Lock waits for the mutex of cluster and returns the function that unlocks it. The caller must check afterwards
// whether the cluster is being deleted.
func (l *ClusterLocks) Lock(cluster types.NamespacedName) (unlock func()) {
	sum := fnv.New32a()
	// A write to a hash never fails.
	_, _ = sum.Write([]byte(cluster.String()))
	lock := &l.locks[sum.Sum32()%uint32(len(l.locks))]
	lock.Lock()
	return lock.Unlock
}
