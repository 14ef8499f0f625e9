package departures

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/clusters"
	"github.com/towline/towline/internal/join"
)

// contactLimit is how long a push member may take to answer.
const contactLimit = 10 * time.Second

// Reach knows whether members can be reached.
type Reach struct {
	// Live reads Leases and Namespaces from the API server.
	Live client.Reader
	// Contact asks a push member how it is.
	Contact func(ctx context.Context, m fleet.Member) (fleet.Facts, error)
	// Heard says when the agent of a pull member was last heard of, by who has listened for longer: the clock of an agent may be wrong, and
	// only who saw its Lease renewed knows when. It may be nil.
	Heard func(member types.NamespacedName, lease *coordinationv1.Lease) time.Time
	Clock clock.PassiveClock
	beats join.Beats
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
	last, err := r.lastBeat(ctx, cluster)
	if err != nil {
		return "", err
	}
	if last.IsZero() && !m.Ready {
		return "its agent has never come", nil
	}
	// Whatever the status says: it may have been edited, or restored.
	if last.IsZero() && !cluster.DeletionTimestamp.IsZero() {
		// The Lease was lost. An agent that is at work renews it again.
		last = cluster.DeletionTimestamp.Time
	}
	if !last.IsZero() && r.Clock.Since(last) >= clusters.SilenceLimit {
		return "its agent is silent since " + last.UTC().Format(time.RFC3339), nil
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

// lastBeat returns when the agent of a pull member was last heard of; zero if it never was.
func (r *Reach) lastBeat(ctx context.Context, cluster *libv1beta1.SveltosCluster) (time.Time, error) {
	m := fleet.FromSveltosCluster(cluster)
	lease := &coordinationv1.Lease{}
	err := r.Live.Get(ctx, client.ObjectKey{Namespace: m.DeliveryNamespace, Name: m.Name}, lease)
	if client.IgnoreNotFound(err) != nil {
		return time.Time{}, fmt.Errorf("read lease of %s: %w", m.Key(), err)
	}
	now := r.Clock.Now()
	last := r.beats.Last(cluster, lease, now)
	if !last.IsZero() && r.Heard != nil {
		if heard := r.Heard(client.ObjectKeyFromObject(cluster), lease); heard.After(last) {
			last = heard
		}
	}
	if reported := cluster.Status.AgentLastReportTime; reported != nil && reported.After(last) && !reported.After(now) {
		last = reported.Time
	}
	return last, nil
}
