package spaces

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

const (
	// agentRemoved is what an agent says on its Lease, as kube.AnnotationAgentOrder, once it has committed itself to remove itself.
	agentRemoved = "removed"
	// dismissed is what kube.AnnotationAgentOrder says on the Cluster of a push member once the hub's account there is gone.
	dismissed = "dismissed"
	// contactLimit is how long a push member may take to answer, or one that is not ready to let our account be removed.
	contactLimit = 5 * time.Second
)

// alive says whether the member gives a sign of life: it answers, or its agent renews its Lease.
func (c *Controller) alive(ctx context.Context, s *state) (bool, error) {
	if s.member.Mode == fleet.Pull {
		return c.heard(ctx, s)
	}
	contact, cancel := context.WithTimeout(ctx, contactLimit)
	defer cancel()
	member, err := c.memberClient(contact, s.member)
	if err == nil {
		err = member.Get(contact, client.ObjectKey{Name: metav1.NamespaceSystem}, &corev1.Namespace{})
	}
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	// That it is not reached is a finding, not an error.
	return err == nil, nil
}

// heard says whether the agent of a pull member counts as alive. One that never came does not.
func (c *Controller) heard(ctx context.Context, s *state) (bool, error) {
	lease, err := c.lease(ctx, s)
	if err != nil || lease == nil || lease.Spec.RenewTime == nil {
		return false, err
	}
	return c.Heartbeats.Look(s.member, lease, "").State != heartbeats.Silent, nil
}

func (c *Controller) memberClient(ctx context.Context, m fleet.Member) (client.Client, error) {
	config, err := c.Config(ctx, m)
	if err != nil {
		return nil, err
	}
	config = rest.CopyConfig(config)
	config.Timeout = answerLimit
	// Listing the kinds of the member takes no context.
	if deadline, set := ctx.Deadline(); set {
		config.Timeout = min(config.Timeout, max(time.Until(deadline), time.Second))
	}
	return client.New(config, client.Options{Scheme: kube.Scheme()})
}

// dismiss has that removed from the member which its registration put there, each mode in its own way. Nobody is waited for who is not reached.
func (c *Controller) dismiss(ctx context.Context, s *state) error {
	return map[fleet.Mode]func(context.Context, *state) error{fleet.Push: c.dismissHub, fleet.Pull: c.dismissAgent}[s.member.Mode](ctx, s)
}

// dismissHub removes the account that this hub has on a push member.
func (c *Controller) dismissHub(ctx context.Context, s *state) error {
	if s.cluster.Annotations[kube.AnnotationAgentOrder] == dismissed || s.cluster.Spec.SecretRef == nil {
		return nil
	}
	limit := answerLimit
	if s.member.Abandoned {
		limit = contactLimit
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := c.removeMember(limited, s)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	// An account that is not accepted any more was removed in an earlier run, by its last request.
	if err != nil && !apierrors.IsUnauthorized(err) && !apierrors.IsForbidden(err) {
		if alive, failure := c.alive(ctx, s); failure != nil || alive && c.patience.still(s.cluster.UID, "account", c.Clock.Now()) < answerLimit {
			return waiting(failure, "the hub's account on it to be removed ("+err.Error()+")")
		}
		log.FromContext(ctx).Info("the hub's account on the cluster is left there", logkeys.Reason, err.Error())
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "LeftBehind", "Delete",
			"what the registration of cluster %s made on it is left there: %s", s.cluster.Name, err)
	}
	return c.order(ctx, s, dismissed)
}

func (c *Controller) removeMember(ctx context.Context, s *state) error {
	hubID := s.cluster.Annotations[kube.AnnotationHub]
	member, err := c.memberClient(ctx, s.member)
	if err != nil {
		return err
	}
	removed, err := karmada.RemoveMember(ctx, member, s.cluster.Name, s.member.MemberNamespace, hubID)
	if len(removed) > 0 {
		log.FromContext(ctx).Info("removed the registration from the cluster", logkeys.Count, len(removed))
	}
	return err
}

// order notes on the Cluster what is asked of the agent, or done in its place.
func (c *Controller) order(ctx context.Context, s *state, what string) error {
	noted := s.cluster.DeepCopy()
	metav1.SetMetaDataAnnotation(&noted.ObjectMeta, kube.AnnotationAgentOrder, what)
	if err := c.Live.Patch(ctx, noted, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("note the order to the agent: %w", err)
	}
	s.cluster = noted
	return nil
}

// told says whether the agent was ordered to remove itself.
func told(cluster *clusterv1alpha1.Cluster) bool {
	return cluster.Annotations[kube.AnnotationAgentOrder] == kube.AgentOrderRemove
}

// orderAgent orders the agent to remove itself. An answer from before that is from a backup, and goes first.
func (c *Controller) orderAgent(ctx context.Context, s *state, lease *coordinationv1.Lease) error {
	if lease.Annotations[kube.AnnotationAgentOrder] != "" {
		asked := lease.DeepCopy()
		delete(asked.Annotations, kube.AnnotationAgentOrder)
		if err := c.Live.Patch(ctx, asked, client.MergeFrom(lease), client.FieldOwner(kube.FieldManager)); err != nil {
			return fmt.Errorf("remove an earlier answer of the agent: %w", err)
		}
	}
	return c.order(ctx, s, kube.AgentOrderRemove)
}

// dismissAgent orders the agent to remove itself and waits until it has committed itself to that.
func (c *Controller) dismissAgent(ctx context.Context, s *state) error {
	lease, err := c.lease(ctx, s)
	if err != nil || lease == nil || lease.Spec.RenewTime == nil {
		return err
	}
	answered := lease.Annotations[kube.AnnotationAgentOrder] == agentRemoved
	if answered && !told(s.cluster) {
		// The cache may be behind what the agent has answered.
		if err := c.Live.Get(ctx, client.ObjectKeyFromObject(s.cluster), s.cluster); err != nil {
			return fmt.Errorf("read cluster %s: %w", s.cluster.Name, err)
		}
	}
	if answered && told(s.cluster) {
		return nil
	}
	if !told(s.cluster) {
		if err := c.orderAgent(ctx, s, lease); err != nil {
			return err
		}
	}
	const what = "its agent to remove itself"
	limit := answerLimit
	if s.member.Abandoned {
		// It was not reached a moment ago. One that is only late still learns what to do.
		limit = contactLimit
		if alive, err := c.alive(ctx, s); err != nil || !alive {
			return err
		}
	}
	if c.patience.still(s.cluster.UID, what, c.Clock.Now()) < limit {
		return waiting(nil, what)
	}
	log.FromContext(ctx).Info("the agent of the cluster is left there")
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "LeftBehind", "Delete", "the agent of cluster %s has not removed itself", s.cluster.Name)
	return nil
}
