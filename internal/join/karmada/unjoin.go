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

// goneWait is how long the member's garbage collector may take.
const goneWait = 10 * time.Second

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
	hub, err := newClient(r.Hub)
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
		tell(r.Progress, "warning: "+err.Error())
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
	member, err := newClient(r.Member)
	if err != nil {
		return 0, fmt.Errorf("connect to the cluster: %w", err)
	}
	refs, err := RemoveMember(ctx, member, r.Name, r.ClusterNamespace, hubID)
	for _, ref := range refs {
		tell(r.Progress, fmt.Sprintf("Deleted %s from cluster %s", ref, r.Name))
	}
	if err != nil {
		return len(refs), err
	}
	f := footprint{member: member, cluster: r.Name, namespace: r.ClusterNamespace, hubID: hubID}
	// What goes later goes by itself.
	err = wait.PollUntilContextTimeout(ctx, tokenPoll, goneWait, true, func(context.Context) (bool, error) { return f.left(ctx) })
	if err != nil && (ctx.Err() != nil || !wait.Interrupted(err)) {
		return len(refs), fmt.Errorf("wait for the registration to be gone from cluster %s: %w", r.Name, err)
	}
	return len(refs), nil
}

// left says whether everything is gone from the cluster that the registration alone used.
func (f footprint) left(ctx context.Context) (bool, error) {
	for _, obj := range append(f.own(), f.shared()...) {
		live, found, err := f.find(ctx, obj)
		if err != nil {
			return false, err
		}
		// A namespace that is being deleted takes Kubernetes some seconds.
		if !found || !live.GetDeletionTimestamp().IsZero() {
			continue
		}
		if users := usersOf(live); f.isOurs(live) || len(users) == 1 && users[0] == f.user() {
			return false, nil
		}
	}
	return true, nil
}
