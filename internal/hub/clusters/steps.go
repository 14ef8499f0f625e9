package clusters

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// state is what the steps of one reconcile know.
type state struct {
	cluster *libv1beta1.SveltosCluster
	member  fleet.Member
	// status and labels are what the cluster object shall have.
	status libv1beta1.SveltosClusterStatus
	labels map[string]string
	// next is when to look again if nothing happens until then; zero means never.
	next time.Duration
}

// contact finds out how the member is, each mode in its own way.
func (c *Controller) contact(ctx context.Context, s *state) error {
	if s.member.Refused != "" {
		s.status = refused(s.cluster.Status, s.member.Refused)
		return nil
	}
	return map[fleet.Mode]func(context.Context, *state) error{fleet.Push: c.dial, fleet.Pull: c.listen}[s.member.Mode](ctx, s)
}

// dial asks a push member. That it does not answer is a finding, not an error.
func (c *Controller) dial(ctx context.Context, s *state) error {
	contact, cancel := context.WithTimeout(ctx, contactLimit)
	defer cancel()
	s.next = contactInterval
	facts, err := c.Contact(contact, s.member)
	if ctx.Err() != nil {
		return fmt.Errorf("contact %s: %w", s.member.Key(), ctx.Err())
	}
	if err != nil {
		s.status = missed(s.cluster.Status, s.cluster.Spec.ConsecutiveFailureThreshold, err.Error())
		return nil
	}
	s.status = reached(s.cluster.Status, facts)
	s.labels, _ = labelled(s.cluster.Labels, facts.Version)
	return nil
}

// listen looks at the heartbeats of a pull member's agent.
func (c *Controller) listen(ctx context.Context, s *state) error {
	lease := &coordinationv1.Lease{}
	err := c.Hub.Get(ctx, types.NamespacedName{Namespace: s.member.DeliveryNamespace, Name: s.member.Name}, lease)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("read lease of %s: %w", s.member.Key(), err)
	}
	last := c.lastBeat(client.ObjectKeyFromObject(s.cluster), lease)
	if reported := s.cluster.Status.AgentLastReportTime; reported != nil && reported.After(last) && !reported.After(c.Clock.Now()) {
		last = reported.Time
	}
	s.status, s.next = heard(s.cluster.Status, s.cluster.Spec.ConsecutiveFailureThreshold, last, c.Clock.Now())
	return nil
}

// lastBeat returns when lease was last renewed, by our clock where we saw it happen.
func (c *Controller) lastBeat(name types.NamespacedName, lease *coordinationv1.Lease) time.Time {
	if lease.Spec.RenewTime == nil {
		return time.Time{}
	}
	now := c.Clock.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	seen, ok := c.beats[name]
	switch {
	case !ok:
		seen = beat{version: lease.ResourceVersion, at: lease.Spec.RenewTime.Time}
		if seen.at.After(now) {
			seen.at = now
		}
	case seen.version != lease.ResourceVersion:
		seen = beat{version: lease.ResourceVersion, at: now}
	}
	c.beats[name] = seen
	return seen.at
}

// label writes the labels of a push member, if they differ.
func (c *Controller) label(ctx context.Context, s *state) error {
	if equality.Semantic.DeepEqual(s.cluster.Labels, s.labels) {
		return nil
	}
	labelled := s.cluster.DeepCopy()
	labelled.Labels = s.labels
	if err := c.Hub.Patch(ctx, labelled, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("label cluster %s: %w", s.member.Key(), err)
	}
	labelled.Status = s.cluster.Status
	s.cluster = labelled
	return nil
}

// report writes the status, if it differs, and tells what changed.
func (c *Controller) report(ctx context.Context, s *state) error {
	before := s.cluster.Status
	if equality.Semantic.DeepEqual(before, s.status) {
		return nil
	}
	// The agent of a pull member writes other fields of the status: a merge patch leaves those alone.
	written := s.cluster.DeepCopy()
	written.Status = s.status
	err := c.Hub.Status().Patch(ctx, written, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager))
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("report on cluster %s: %w", s.member.Key(), err)
	}
	c.tell(s, before)
	return nil
}

// tell records one event per change that people care about.
func (c *Controller) tell(s *state, before libv1beta1.SveltosClusterStatus) {
	now := s.status
	switch {
	case now.Ready && !before.Ready:
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, "Ready", "SveltosCluster", "cluster %s is ready, Kubernetes %s", s.member.Key(), now.Version)
	case now.ConnectionStatus == libv1beta1.ConnectionDown && before.ConnectionStatus != now.ConnectionStatus:
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "Down", "SveltosCluster", "cluster %s is not reached: %s", s.member.Key(), now.FailureMessage)
	case now.ConnectionStatus == libv1beta1.ConnectionHealthy && before.ConnectionStatus == libv1beta1.ConnectionDown:
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, "Healthy", "SveltosCluster", "cluster %s is reached again", s.member.Key())
	case now.FailureMessage != "" && now.FailureMessage != before.FailureMessage && !now.Ready:
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "NotReady", "SveltosCluster", "cluster %s: %s", s.member.Key(), now.FailureMessage)
	}
}
