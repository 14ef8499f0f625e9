package karmada

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
)

// collectorTimeout limits the wait for the member's garbage collector.
const collectorTimeout = 10 * time.Second

// UnjoinRequest is a request to deregister a cluster in push mode.
type UnjoinRequest struct {
	// Hub and Member are the caller's configurations for the hub and for the cluster. Without Member, Unjoin itself
	// deletes nothing on the cluster.
	Hub, Member *rest.Config
	// Name is the name of the Cluster. ClusterNamespace is the namespace of the hub's ServiceAccount on the cluster.
	// Default: fleet.DefaultClusterNamespace.
	Name, ClusterNamespace string
	// Force completes the deregistration after Timeout, see DeleteOptions. An error on the cluster then becomes a warning.
	Force bool
	// DryRun only checks that the Cluster exists and is in push mode.
	DryRun bool
	// Orphan keeps the propagated objects on the cluster.
	Orphan bool
	// Timeout limits the wait for the hub. 0 is no wait.
	Timeout time.Duration
	// Progress is called with the reasons for waiting, the deleted objects and warnings. It is required.
	Progress func(string)
}

// Unjoin deletes a Cluster in push mode, and waits until the hub has deleted the propagated objects. With r.Member, it
// then deletes the remaining objects of the registration on the cluster. It can be interrupted and repeated. It returns
// an ErrNoCluster if neither side has objects of the registration.
func Unjoin(ctx context.Context, r UnjoinRequest) error {
	if err := ValidateName(r.Name); err != nil {
		return err
	}
	r.ClusterNamespace = cmp.Or(r.ClusterNamespace, fleet.DefaultClusterNamespace)
	hub, _, err := join.NewClient(r.Hub, requestTimeout)
	if err != nil {
		return fmt.Errorf("connect to the control plane: %w", err)
	}
	if r.DryRun {
		_, err := clusterOfMode(ctx, hub, r.Name, clusterv1alpha1.Push)
		return err
	}
	deleteErr := DeleteCluster(ctx, hub, r.Name, clusterv1alpha1.Push, DeleteOptions{Orphan: r.Orphan, Force: r.Force, Timeout: r.Timeout, Progress: r.Progress})
	if deleteErr != nil && !errors.Is(deleteErr, ErrNoCluster) || r.Member == nil {
		return deleteErr
	}
	removed, err := r.cleanUpMember(ctx, hub)
	if err != nil && r.Force && ctx.Err() == nil {
		r.Progress("warning: " + err.Error())
		err = nil
	}
	if err != nil || removed > 0 {
		// If objects were removed, an earlier run was interrupted after the deletion of the Cluster.
		return err
	}
	return deleteErr
}

// cleanUpMember deletes the objects of the registration on the cluster, and waits for its garbage collector. removed is
// the number of deleted objects.
func (r UnjoinRequest) cleanUpMember(ctx context.Context, hub client.Client) (removed int, err error) {
	member, err := newMemberRegistration(r.Member, r.Name, r.ClusterNamespace, "")
	if err != nil {
		return 0, err
	}
	if member.hubID, err = join.ClusterUID(ctx, hub); err != nil {
		return 0, err
	}
	refs, err := member.deleteObjects(ctx)
	for _, ref := range refs {
		r.Progress(fmt.Sprintf("Deleted %s from cluster %s", ref, r.Name))
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

// isRemoved returns whether the member's garbage collector has deleted the objects of the cluster.
func (m *memberRegistration) isRemoved(ctx context.Context) (bool, error) {
	for _, obj := range m.clusterObjects() {
		err := m.client.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		if !apierrors.IsNotFound(err) && (err != nil || m.isOwn(obj)) {
			return false, err
		}
	}
	return true, nil
}
