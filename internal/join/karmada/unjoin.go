package karmada

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
)

// collectorTimeout limits the wait for the member's garbage collector.
const collectorTimeout = 10 * time.Second

// UnjoinRequest asks to take a cluster in push mode out of the fleet.
type UnjoinRequest struct {
	// Hub is how the operator reaches the hub, Member the cluster; nil if only the hub is to remove its account there.
	Hub, Member *rest.Config
	// Name of the cluster; ClusterNamespace is where its registration has its account on the cluster.
	Name, ClusterNamespace string
	// Force ends the removal when Wait is over, and makes failures on the cluster lines of Progress.
	Force bool
	// DryRun only finds out whether there is such a cluster.
	DryRun bool
	// Orphan leaves on the cluster what was propagated to it.
	Orphan bool
	// Wait is how long the hub may take. Zero means DeleteWait.
	Wait time.Duration
	// Progress is told what is waited for and what was removed; it may be nil.
	Progress func(string)
}

// Unjoin takes a cluster in push mode out of the fleet: it deletes its Cluster, with which the hub withdraws what was
// propagated, and removes from the cluster, if it has a way there, what the registration made. It can be interrupted
// and repeated. It returns an error that is ErrNoCluster if there is nothing to do.
func Unjoin(ctx context.Context, r UnjoinRequest) error {
	if err := ValidateName(r.Name); err != nil {
		return err
	}
	if r.ClusterNamespace == "" {
		r.ClusterNamespace = fleet.DefaultClusterNamespace
	}
	hub, _, err := newClients(r.Hub)
	if err != nil {
		return fmt.Errorf("connect to the control plane: %w", err)
	}
	if r.DryRun {
		_, err := clusterOfMode(ctx, hub, r.Name, clusterv1alpha1.Push)
		return err
	}
	missing := DeleteCluster(ctx, hub, r.Name, clusterv1alpha1.Push, DeleteOptions{Orphan: r.Orphan, Force: r.Force, Wait: r.Wait, Progress: r.Progress})
	if missing != nil && !errors.Is(missing, ErrNoCluster) || r.Member == nil {
		return missing
	}
	removed, err := r.clean(ctx, hub)
	if err != nil && r.Force && ctx.Err() == nil {
		report(r.Progress, "warning: "+err.Error())
		err = nil
	}
	if err != nil || removed > 0 {
		// An earlier run may have been cut off after the Cluster was gone.
		return err
	}
	return missing
}

// clean removes from the cluster what is there of the registration, and waits for its garbage collector.
func (r UnjoinRequest) clean(ctx context.Context, hub client.Client) (removed int, err error) {
	hubID, err := HubID(ctx, hub)
	if err != nil {
		return 0, err
	}
	member, err := newMemberObjects(r.Member, r.Name, r.ClusterNamespace, hubID)
	if err != nil {
		return 0, err
	}
	refs, err := member.remove(ctx)
	for _, ref := range refs {
		report(r.Progress, fmt.Sprintf("Deleted %s from cluster %s", ref, r.Name))
	}
	if err != nil {
		return len(refs), err
	}
	err = wait.PollUntilContextTimeout(ctx, pollInterval, collectorTimeout, true, func(context.Context) (bool, error) { return member.isRemoved(ctx) })
	// After the timeout, the garbage collector continues.
	if err != nil && (ctx.Err() != nil || !wait.Interrupted(err)) {
		return len(refs), fmt.Errorf("wait until the registration is removed from cluster %s: %w", r.Name, err)
	}
	return len(refs), nil
}

// isRemoved returns whether no objects are left that only this registration uses. A namespace that is being deleted
// does not count, because that takes some seconds.
func (m *memberObjects) isRemoved(ctx context.Context) (bool, error) {
	for _, obj := range append(m.own(), m.shared()...) {
		live, found, err := m.get(ctx, obj)
		if err != nil {
			return false, err
		}
		if !found || !live.GetDeletionTimestamp().IsZero() {
			continue
		}
		if users := usersOf(live); m.isOwn(live) || len(users) == 1 && users[0] == m.user() {
			return false, nil
		}
	}
	return true, nil
}
