package join

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

const (
	// forcedTimeout is how long the hub may take to let go of a cluster by force: it waits 20 s for withdrawals and 10
	// s for the agent, and looks first for 10 s whether the member answers.
	forcedTimeout = 45 * time.Second
	// takeoverTimeout is how long a hub may take to begin with that: another one takes over within 15 s, and asks the
	// member for 10 s first.
	takeoverTimeout = 30 * time.Second
	// leaseGrace is how long after its end a leader's Lease may still be about to be taken over.
	leaseGrace = 4 * time.Second
	// watchTimeout is how long one watch of a cluster that is leaving lasts: its connection can be lost unnoticed.
	watchTimeout = 10 * time.Second
	// deregisterPoll is the time between two looks at a cluster that is leaving and cannot be watched.
	deregisterPoll = 300 * time.Millisecond
)

// awaitDeletion waits until the SveltosCluster is deleted. After the timeout it forces the deletion if the request has
// Force.
func (d *deregistration) awaitDeletion(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	limit := d.request.Wait
	switch {
	case limit == 0:
		limit = DeregisterWait
	case limit < 0:
		limit = 0
	}
	gone, err := d.await(ctx, cluster, limit)
	if err != nil || gone {
		return err
	}
	if !d.request.Force {
		return d.timeoutError(ctx, cluster)
	}
	d.done.Forced = true
	if err := AddDeregisterOptions(ctx, d.hubClient, cluster, kube.DeregisterForce); client.IgnoreNotFound(err) != nil {
		return err
	}
	if d.hasNoHub(ctx, cluster) {
		return d.timeoutError(ctx, cluster)
	}
	for _, limit := range []time.Duration{takeoverTimeout, forcedTimeout - takeoverTimeout} {
		gone, err = d.await(ctx, cluster, limit)
		if err != nil || gone {
			return err
		}
		if !d.hasHubChange {
			break
		}
	}
	return d.timeoutError(ctx, cluster)
}

// hasNoHub returns whether no hub reconciles the cluster: no hub has changed it, and the Lease of its shard's hubs has
// expired.
func (d *deregistration) hasNoHub(ctx context.Context, cluster *libv1beta1.SveltosCluster) bool {
	if d.hasHubChange {
		return false
	}
	name := "towline-hub"
	if key := fleet.FromSveltosCluster(cluster).Shard; key != "" {
		name += "-" + key
	}
	lease := &coordinationv1.Lease{}
	// Hubs without leader election have none.
	if err := d.hubClient.Get(ctx, client.ObjectKey{Namespace: kube.AgentNamespace, Name: name}, lease); err != nil || lease.Spec.RenewTime == nil {
		return false
	}
	life := time.Duration(ptr.Deref(lease.Spec.LeaseDurationSeconds, 0)) * time.Second
	return time.Since(lease.Spec.RenewTime.Time) > life+leaseGrace
}

// observe copies now to cluster, and records whether a hub has changed it.
func (d *deregistration) observe(cluster, now *libv1beta1.SveltosCluster) {
	done := func(c *libv1beta1.SveltosCluster) []string {
		a := c.Annotations
		return []string{a[kube.AnnotationDeregister], a[kube.AnnotationDeadline], a[kube.AnnotationAgentOrder], a[kube.AnnotationLeftBehind], strings.Join(c.Finalizers, ","), c.Status.FailureMessage}
	}
	d.hasHubChange = d.hasHubChange || !slices.Equal(done(cluster), done(now))
	now.DeepCopyInto(cluster)
}

// await waits until the SveltosCluster is deleted or replaced, but no longer than limit. It updates cluster.
func (d *deregistration) await(ctx context.Context, cluster *libv1beta1.SveltosCluster, limit time.Duration) (gone bool, err error) {
	uid := cluster.UID
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		// Not limited, so that the cluster is read at least once.
		now, found, err := findCluster(ctx, d.hubClient, d.request.Request)
		if err != nil {
			return false, err
		}
		if !found || now.UID != uid {
			return true, nil
		}
		d.observe(cluster, now)
		d.reportProgress(cluster)
		if limited.Err() == nil && d.watch(limited, cluster) {
			return true, nil
		}
		select {
		case <-limited.Done():
			return false, ctx.Err()
		case <-time.After(deregisterPoll):
		}
	}
}

// watch observes every change of cluster, so that the last status is not missed. It returns true after the deletion of
// cluster, and false if the watch fails or ends, or after watchTimeout.
func (d *deregistration) watch(ctx context.Context, cluster *libv1beta1.SveltosCluster) (gone bool) {
	ctx, cancel := context.WithTimeout(ctx, watchTimeout)
	defer cancel()
	from := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: cluster.ResourceVersion}}
	changes, err := d.hubClient.Watch(ctx, &libv1beta1.SveltosClusterList{}, from,
		client.InNamespace(cluster.Namespace), client.MatchingFields{metav1.ObjectNameField: cluster.Name})
	if err != nil {
		return false
	}
	defer changes.Stop()
	for change := range changes.ResultChan() {
		now, ok := change.Object.(*libv1beta1.SveltosCluster)
		if !ok || now.UID != cluster.UID {
			return false
		}
		if change.Type == watch.Deleted {
			now.DeepCopyInto(cluster)
			return true
		}
		d.observe(cluster, now)
		d.reportProgress(cluster)
	}
	return false
}

func (d *deregistration) reportProgress(cluster *libv1beta1.SveltosCluster) {
	message, waiting := strings.CutPrefix(cluster.Status.FailureMessage, WaitingPrefix)
	if !waiting || d.request.Progress == nil {
		return
	}
	if message != d.progress {
		d.progress = message
		d.request.Progress("waiting for " + message)
	}
}

// timeoutError returns the reason why the cluster is not deregistered yet.
func (d *deregistration) timeoutError(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	message, waiting := strings.CutPrefix(cluster.Status.FailureMessage, WaitingPrefix)
	if !waiting || d.done.Forced && !d.hasHubChange || d.hasNoHub(ctx, cluster) {
		shard := "the default shard"
		if key := fleet.FromSveltosCluster(cluster).Shard; key != "" {
			shard = "shard " + key
		}
		return fmt.Errorf("no hub has taken it up: is the hub of %s running? %w when it is", shard, ErrStillDeregistering)
	}
	if d.done.Forced {
		return fmt.Errorf("still waiting for %s; %w", message, ErrStillDeregistering)
	}
	return fmt.Errorf("still waiting for %s; %w when the cluster answers; "+
		"to leave behind what cannot be reached run again with --force", message, ErrStillDeregistering)
}
