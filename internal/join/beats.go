package join

import (
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/types"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// beatsKept is how long a Beats remembers a Lease that nobody asks for.
const beatsKept = time.Hour

// Beats knows when Leases of agents were renewed, by our clock where it saw that happen: an agent's clock may be wrong, and an agent may say what
// it likes. The zero value is ready.
type Beats struct {
	mu   sync.Mutex
	seen map[types.UID]beat
}

// beat is what was seen of a Lease last.
type beat struct {
	renewed   time.Time
	at, asked time.Time
}

// Last returns when the agent of cluster was last heard of according to its lease, which is as it was just read; zero if it never was. now
// is the time by our clock. A renewal in the future counts as one at the time when it was first seen. A Lease from before the cluster says nothing
// of it.
func (b *Beats) Last(cluster *libv1beta1.SveltosCluster, lease *coordinationv1.Lease, now time.Time) time.Time {
	if lease.Spec.RenewTime == nil || lease.CreationTimestamp.Before(&cluster.CreationTimestamp) {
		return time.Time{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.seen == nil {
		b.seen = map[types.UID]beat{}
	}
	last, ok := b.seen[lease.UID]
	if !ok {
		b.forget(now)
	}
	if renewed := lease.Spec.RenewTime.Time; !ok || !last.renewed.Equal(renewed) {
		last = beat{renewed: renewed, at: renewed}
		if ok || renewed.After(now) {
			last.at = now
		}
	}
	last.asked = now
	b.seen[lease.UID] = last
	return last.at
}

// forget drops what was not asked for in a long time, and Leases that are gone with it.
func (b *Beats) forget(now time.Time) {
	for uid, last := range b.seen {
		if now.Sub(last.asked) > beatsKept {
			delete(b.seen, uid)
		}
	}
}
