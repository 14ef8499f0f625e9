package deregistration

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
)

// contactTimeout is the timeout of a request to a push member.
const contactTimeout = 10 * time.Second

// Reachability checks whether members can be reached.
type Reachability struct {
	// Live reads Leases and Namespaces from the API server.
	Live client.Reader
	// Contact sends a request to a push member.
	Contact func(ctx context.Context, m fleet.Member) (fleet.Facts, error)
	// Heartbeats monitors the agents of pull members.
	Heartbeats *heartbeats.Monitor
}

// UnreachableReason returns the reason why a member is unreachable, "" if it is reachable. It sends a request to a push
// member, and checks the last heartbeat of a pull member's agent.
func (r *Reachability) UnreachableReason(ctx context.Context, cluster *libv1beta1.SveltosCluster) (string, error) {
	m := fleet.FromSveltosCluster(cluster)
	if m.Mode == fleet.Push {
		return r.checkPush(ctx, m)
	}
	terminating, err := r.terminatingNamespace(ctx, m)
	if err != nil {
		return "", err
	}
	if terminating != "" {
		return "namespace " + terminating + " is being deleted, and its agent's identity with it", nil
	}
	liveness, hasReported, err := r.evaluateAgent(ctx, cluster)
	switch {
	case err != nil:
		return "", err
	case !hasReported:
		return "its agent has never reported", nil
	case liveness.State == heartbeats.Silent:
		return "its agent has not reported since " + liveness.LastSeen.UTC().Format(time.RFC3339), nil
	}
	return "", nil
}

// checkPush returns the reason why a push member is unreachable, "" if it answers a request.
func (r *Reachability) checkPush(ctx context.Context, m fleet.Member) (string, error) {
	contactCtx, cancel := context.WithTimeout(ctx, contactTimeout)
	defer cancel()
	_, err := r.Contact(contactCtx, m)
	if ctx.Err() != nil {
		return "", fmt.Errorf("contact %s: %w", m.Key(), ctx.Err())
	}
	if err != nil {
		// An unreachable member is a result, not an error.
		return "it is unreachable: " + err.Error(), nil
	}
	return "", nil
}

// terminatingNamespace returns the name of a namespace of the member that is being deleted, "" if there is none.
func (r *Reachability) terminatingNamespace(ctx context.Context, m fleet.Member) (string, error) {
	names := []string{m.Namespace}
	if m.Mode == fleet.Pull && m.DeliveryNamespace != m.Namespace {
		names = append(names, m.DeliveryNamespace)
	}
	for _, name := range names {
		namespace := &corev1.Namespace{}
		err := r.Live.Get(ctx, client.ObjectKey{Name: name}, namespace)
		if client.IgnoreNotFound(err) != nil {
			return "", fmt.Errorf("read namespace %s: %w", name, err)
		}
		if err == nil && !namespace.DeletionTimestamp.IsZero() {
			return name, nil
		}
	}
	return "", nil
}

// evaluateAgent evaluates the heartbeats of the agent of a pull member. hasReported is true if the status or the Lease
// shows that the agent has ever reported. Both are read, since an edit or a restore can delete the status. A Lease that
// is older than the cluster belongs to an earlier cluster with the same name, and is ignored.
func (r *Reachability) evaluateAgent(ctx context.Context, cluster *libv1beta1.SveltosCluster) (
	liveness heartbeats.Liveness, hasReported bool, err error,
) {
	m := fleet.FromSveltosCluster(cluster)
	lease := &coordinationv1.Lease{}
	if err := r.Live.Get(ctx, client.ObjectKey{Namespace: m.DeliveryNamespace, Name: m.Name}, lease); client.IgnoreNotFound(err) != nil {
		return liveness, false, fmt.Errorf("read Lease of %s: %w", m.Key(), err)
	}
	hasReported = m.Ready || cluster.Status.AgentLastReportTime != nil ||
		lease.Spec.RenewTime != nil && !lease.CreationTimestamp.Before(&cluster.CreationTimestamp)
	return r.Heartbeats.EvaluateLease(m, lease, ""), hasReported, nil
}
