package departures

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

// contactLimit is how long a push member may take to answer.
const contactLimit = 10 * time.Second

// Reach knows whether members can be reached.
type Reach struct {
	// Live reads Leases and Namespaces from the API server.
	Live client.Reader
	// Contact asks a push member how it is.
	Contact func(ctx context.Context, m fleet.Member) (fleet.Facts, error)
	// Heartbeats judges the agents of pull members.
	Heartbeats *heartbeats.Judge
}

// Away says, for people, why nothing can be done on a member, "" if something can. It contacts a push member; of a pull member, it says what
// its agent was last heard of.
func (r *Reach) Away(ctx context.Context, cluster *libv1beta1.SveltosCluster) (string, error) {
	m := fleet.FromSveltosCluster(cluster)
	if m.Mode == fleet.Push {
		return r.call(ctx, m)
	}
	doomed, err := r.doomed(ctx, m)
	if err != nil {
		return "", err
	}
	if doomed != "" {
		return "namespace " + doomed + " is being deleted, and its agent's identity with it", nil
	}
	verdict, came, err := r.listen(ctx, cluster)
	switch {
	case err != nil:
		return "", err
	case !came:
		return "its agent has never come", nil
	case verdict.State == heartbeats.Silent:
		return "its agent is silent since " + verdict.Since.UTC().Format(time.RFC3339), nil
	}
	return "", nil
}

func (r *Reach) call(ctx context.Context, m fleet.Member) (string, error) {
	contact, cancel := context.WithTimeout(ctx, contactLimit)
	defer cancel()
	_, err := r.Contact(contact, m)
	if ctx.Err() != nil {
		return "", fmt.Errorf("contact %s: %w", m.Key(), ctx.Err())
	}
	if err != nil {
		// That it is not reached is a finding, not an error.
		return "it is not reached: " + err.Error(), nil
	}
	return "", nil
}

// doomed returns the namespace of a member that is going away, "" if none is.
func (r *Reach) doomed(ctx context.Context, m fleet.Member) (string, error) {
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

// listen judges the agent of a pull member. came is false if there has never been one: neither the status says so, which may have been edited or
// restored, nor a heartbeat. A Lease from before the cluster is that of another one.
func (r *Reach) listen(ctx context.Context, cluster *libv1beta1.SveltosCluster) (verdict heartbeats.Verdict, came bool, err error) {
	m := fleet.FromSveltosCluster(cluster)
	lease := &coordinationv1.Lease{}
	if err := r.Live.Get(ctx, client.ObjectKey{Namespace: m.DeliveryNamespace, Name: m.Name}, lease); client.IgnoreNotFound(err) != nil {
		return verdict, false, fmt.Errorf("read lease of %s: %w", m.Key(), err)
	}
	came = m.Ready || cluster.Status.AgentLastReportTime != nil ||
		lease.Spec.RenewTime != nil && !lease.CreationTimestamp.Before(&cluster.CreationTimestamp)
	return r.Heartbeats.Look(m, lease, ""), came, nil
}
