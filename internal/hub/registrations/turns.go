package registrations

import (
	"hash/fnv"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// Turns lets one controller at a time work on the registration of a cluster. The zero value is ready.
type Turns struct {
	// Clusters share a lock now and then, which only costs them a moment.
	locks [64]sync.Mutex
}

// Take waits for the turn of cluster and returns how to end it. Who has one must find out then whether the cluster is being deleted.
func (t *Turns) Take(cluster types.NamespacedName) (end func()) {
	sum := fnv.New32a()
	// Writing to a hash never fails.
	_, _ = sum.Write([]byte(cluster.String()))
	lock := &t.locks[sum.Sum32()%uint32(len(t.locks))]
	lock.Lock()
	return lock.Unlock
}
