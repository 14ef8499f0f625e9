package registration

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

// snapshotLife is the time for which a snapshot is used. A check can miss changes within this time before it. The check
// after resyncInterval finds them.
const snapshotLife = time.Minute

// snapshots takes snapshots of the identities of all agents. All checks within snapshotLife share a snapshot. The zero
// value is ready for use.
type snapshots struct {
	// mu guards latest. It is held while a snapshot is taken, since concurrent checks wait for it.
	mu     sync.Mutex
	latest *join.Snapshot
}

// findEstablished returns the delivery namespace of a cluster whose identity is complete in the latest snapshot. It
// returns "" for other clusters and after errors: the caller then checks the identity on the API server.
func (s *snapshots) findEstablished(ctx context.Context, c *Controller, cluster *libv1beta1.SveltosCluster) (delivery string) {
	snapshot := s.get(ctx, c.Live)
	// A deregistration may have begun while this reconcile waited for the lock or for the snapshot.
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

// get returns the latest snapshot, or takes a new one. After an error it returns an empty snapshot for snapshotLife.
func (s *snapshots) get(ctx context.Context, live client.Client) *join.Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest != nil {
		return s.latest
	}
	snapshot, err := join.TakeSnapshot(ctx, live)
	if ctx.Err() != nil {
		return &join.Snapshot{} // the next caller takes a snapshot
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
