package registrations

import (
	"context"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube/logkeys"
)

// snapshotLife is the time for which a snapshot is used. A change of an object within this time before the check of its
// cluster is found after resync only, like a change just after the check.
const snapshotLife = time.Minute

// snapshots takes snapshots of all registrations and shares each between the checks of a minute. The zero value is
// ready.
type snapshots struct {
	// mu guards latest. It is held while a snapshot is taken: the other checks of that time need the same one.
	mu     sync.Mutex
	latest *join.Snapshot
}

// findEstablished returns the delivery namespace of a cluster whose identity is unchanged in the latest snapshot, ""
// for any other cluster. It returns "" after errors, too, since the caller then reads the identity from the API server.
func (s *snapshots) findEstablished(ctx context.Context, c *Controller, cluster *libv1beta1.SveltosCluster) (delivery string) {
	snapshot := s.get(ctx, c.Live)
	// A deregistration can have begun while this reconcile waited for the lock or for the snapshot.
	current := &libv1beta1.SveltosCluster{}
	if err := c.Hub.Get(ctx, client.ObjectKeyFromObject(cluster), current); err != nil || current.UID != cluster.UID {
		return ""
	}
	delivery, err := snapshot.FindEstablished(ctx, c.Cache, current)
	if err != nil {
		log.FromContext(ctx).Error(err, "compare the agent's identity with a snapshot")
		return ""
	}
	return delivery
}

// get returns the latest snapshot. After an error it is empty for snapshotLife: then no cluster is unchanged in it.
func (s *snapshots) get(ctx context.Context, live client.Client) *join.Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest != nil {
		return s.latest
	}
	snapshot, err := join.TakeSnapshot(ctx, live)
	if ctx.Err() != nil {
		return &join.Snapshot{} // the next caller takes one
	}
	if err != nil {
		log.FromContext(ctx).Info("each agent's identity is read alone, since they cannot be listed", logkeys.Reason, err.Error())
		snapshot = &join.Snapshot{}
	}
	s.latest = snapshot
	time.AfterFunc(snapshotLife, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.latest = nil
	})
	return snapshot
}
