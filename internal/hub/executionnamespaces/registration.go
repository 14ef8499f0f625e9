package executionnamespaces

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
	// agentRemoved is the value that an agent sets as kube.AnnotationAgentRequest on its Lease before it removes itself.
	agentRemoved = "removed"
	// accountRemoved is the value of kube.AnnotationAgentRequest on the Cluster of a push member after the removal of the
	// hub account.
	accountRemoved = "dismissed"
	// contactTimeout limits the request of isAlive, and the removal of the registration from an abandoned member.
	contactTimeout = 5 * time.Second
)

// isAlive returns whether a push member answers a request, or the agent of a pull member renews its Lease.
func (c *Controller) isAlive(ctx context.Context, s *state) (bool, error) {
	if s.member.Mode == fleet.Pull {
		return c.isAgentAlive(ctx, s)
	}
	contactCtx, cancel := context.WithTimeout(ctx, contactTimeout)
	defer cancel()
	memberClient, err := c.memberClient(contactCtx, s.member)
	if err == nil {
		err = memberClient.Get(contactCtx, client.ObjectKey{Name: metav1.NamespaceSystem}, &corev1.Namespace{})
	}
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	return err == nil, nil
}

// isAgentAlive returns whether the agent of a pull member renews its Lease. It returns true for an agent about which
// the hub does not know that yet (heartbeats.Unknown), and false for an agent that has never renewed its Lease.
func (c *Controller) isAgentAlive(ctx context.Context, s *state) (bool, error) {
	lease, err := c.getLease(ctx, s)
	if err != nil || lease == nil || lease.Spec.RenewTime == nil {
		return false, err
	}
	return c.Heartbeats.EvaluateLease(s.member, lease, "").State != heartbeats.Silent, nil
}

func (c *Controller) memberClient(ctx context.Context, m fleet.Member) (client.Client, error) {
	config, err := c.memberConfig(ctx, m)
	if err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: kube.Scheme()})
}

// memberConfig returns the configuration for requests to a push member. Each request has a timeout: stallTimeout, or
// less if ctx ends sooner.
func (c *Controller) memberConfig(ctx context.Context, m fleet.Member) (*rest.Config, error) {
	config, err := c.Config(ctx, m)
	if err != nil {
		return nil, err
	}
	config = rest.CopyConfig(config)
	config.Timeout = stallTimeout
	// client.New and API discovery take no context.
	if deadline, set := ctx.Deadline(); set {
		config.Timeout = min(config.Timeout, max(time.Until(deadline), time.Second))
	}
	return config, nil
}

// removeRegistration removes the objects of the registration from the member. It does not wait for an unreachable
// member.
func (c *Controller) removeRegistration(ctx context.Context, s *state) error {
	if s.member.Mode == fleet.Pull {
		return c.removeAgent(ctx, s)
	}
	return c.removeHubAccount(ctx, s)
}

// removeHubAccount deletes the hub account on a push member, and sets accountRemoved on the Cluster.
func (c *Controller) removeHubAccount(ctx context.Context, s *state) error {
	if s.cluster.Annotations[kube.AnnotationAgentRequest] == accountRemoved || s.cluster.Spec.SecretRef == nil {
		return nil
	}
	limit := stallTimeout
	if s.member.Abandoned {
		limit = contactTimeout
	}
	limitedCtx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := c.deleteMemberObjects(limitedCtx, s)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if apierrors.IsNotFound(err) && karmada.IsRegistering(s.cluster) {
		// A registration is running and has not written the Secret yet. If it fails, it removes the account itself.
		return c.setAgentOrder(ctx, s, accountRemoved)
	}
	// Unauthorized or Forbidden: most likely an earlier reconcile has deleted the account.
	if err != nil && !apierrors.IsUnauthorized(err) && !apierrors.IsForbidden(err) {
		if alive, aliveErr := c.isAlive(ctx, s); aliveErr != nil || alive && c.progress.recordPending(s.cluster.UID, "account", c.Clock.Now()) < stallTimeout {
			return errorOrWait(aliveErr, "the deletion of the hub's account on the member ("+err.Error()+")")
		}
		log.FromContext(ctx).Info("the hub's account stays on the cluster", logkeys.Reason, err.Error())
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "LeftBehind", "Delete",
			"the objects of the registration stay on cluster %s: %s", s.cluster.Name, err)
	}
	return c.setAgentOrder(ctx, s, accountRemoved)
}

// deleteMemberObjects deletes the objects of the registration on a push member, including the hub account.
func (c *Controller) deleteMemberObjects(ctx context.Context, s *state) error {
	hubID := s.cluster.Annotations[kube.AnnotationHub]
	config, err := c.memberConfig(ctx, s.member)
	if err != nil {
		return err
	}
	removed, err := karmada.DeleteMemberObjects(ctx, config, s.cluster.Name, s.member.MemberNamespace, hubID)
	if len(removed) > 0 {
		log.FromContext(ctx).Info("removed the registration from the cluster", logkeys.Count, len(removed))
	}
	return err
}

// setAgentOrder sets kube.AnnotationAgentRequest on the Cluster to kube.AgentRequestRemove or accountRemoved.
func (c *Controller) setAgentOrder(ctx context.Context, s *state, order string) error {
	changed := s.cluster.DeepCopy()
	metav1.SetMetaDataAnnotation(&changed.ObjectMeta, kube.AnnotationAgentRequest, order)
	if err := c.Live.Patch(ctx, changed, client.MergeFrom(s.cluster), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("annotate the cluster with the order to the agent: %w", err)
	}
	s.cluster = changed
	return nil
}

// isRemovalOrdered returns whether the Cluster has the order to the agent.
func isRemovalOrdered(cluster *clusterv1alpha1.Cluster) bool {
	return cluster.Annotations[kube.AnnotationAgentRequest] == kube.AgentRequestRemove
}

// orderAgentRemoval orders the agent to remove itself. It first deletes an answer on the Lease: before the order an
// answer can only come from a backup.
func (c *Controller) orderAgentRemoval(ctx context.Context, s *state, lease *coordinationv1.Lease) error {
	if lease.Annotations[kube.AnnotationAgentRequest] != "" {
		changed := lease.DeepCopy()
		delete(changed.Annotations, kube.AnnotationAgentRequest)
		if err := c.Live.Patch(ctx, changed, client.MergeFrom(lease), client.FieldOwner(kube.FieldManager)); err != nil {
			return fmt.Errorf("delete an earlier answer of the agent: %w", err)
		}
	}
	return c.setAgentOrder(ctx, s, kube.AgentRequestRemove)
}

// removeAgent orders the agent to remove itself and waits for its answer. It does not wait for an agent that has never
// renewed its Lease.
func (c *Controller) removeAgent(ctx context.Context, s *state) error {
	lease, err := c.getLease(ctx, s)
	if err != nil || lease == nil || lease.Spec.RenewTime == nil {
		return err
	}
	hasAnswered := lease.Annotations[kube.AnnotationAgentRequest] == agentRemoved
	if hasAnswered && !isRemovalOrdered(s.cluster) {
		// The cached Cluster may be older than the order that the agent has answered.
		if err := c.Live.Get(ctx, client.ObjectKeyFromObject(s.cluster), s.cluster); err != nil {
			return fmt.Errorf("read cluster %s: %w", s.cluster.Name, err)
		}
	}
	if hasAnswered && isRemovalOrdered(s.cluster) {
		return nil
	}
	if !isRemovalOrdered(s.cluster) {
		if err := c.orderAgentRemoval(ctx, s, lease); err != nil {
			return err
		}
	}
	const pendingWork = "its agent to remove itself"
	limit := stallTimeout
	if s.member.Abandoned {
		// The member was unreachable. If its agent is alive again, it gets contactTimeout to follow the order.
		limit = contactTimeout
		if alive, err := c.isAlive(ctx, s); err != nil || !alive {
			return err
		}
	}
	if c.progress.recordPending(s.cluster.UID, pendingWork, c.Clock.Now()) < limit {
		return errorOrWait(nil, pendingWork)
	}
	log.FromContext(ctx).Info("the agent stays on the cluster")
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, "LeftBehind", "Delete", "the agent of cluster %s has not removed itself", s.cluster.Name)
	return nil
}
