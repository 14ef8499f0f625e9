package summaries

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/status"
)

// leave says whether what is withdrawn stays on the member, as nobody's.
func (s *state) leave() bool {
	return s.deleting() && (s.member.KeepAddons || s.spec().StopMatchingBehavior == configv1beta1.LeavePolicies)
}

// lost says whether nobody can be asked to withdraw anything, and nobody is to be waited for: the cluster is gone from the hub, or it is
// deregistered by force and is away.
func (c *Controller) lost(ctx context.Context, s *state) (bool, error) {
	if s.cluster == nil {
		return true, nil
	}
	if !s.deleting() || !s.member.Forced || !s.deployed() {
		return false, nil
	}
	away, err := c.Away(ctx, s.cluster)
	return away != "", err
}

// abandon lets go of a summary of a cluster that is lost. People are told what was left there.
func (c *Controller) abandon(ctx context.Context, s *state) error {
	s.free = true
	s.unlisted = s.leaving()
	if len(s.unlisted) == 0 {
		return nil
	}
	c.tell(s.summary, status.Abandoned(s.summary.Status, s.member))
	log.FromContext(ctx).Info("cluster is lost; what was deployed there is left there", logkeys.Member, s.member.Key())
	return c.dropGroups(ctx, s)
}

// dropGroups deletes the groups of a cluster that is lost from the namespace of its deliveries, or, if that is not known any more, from its
// own. No agent takes that for a withdrawal.
func (c *Controller) dropGroups(ctx context.Context, s *state) error {
	lost := s.member
	if lost.DeliveryNamespace == "" {
		lost.DeliveryNamespace = lost.Namespace
	}
	for _, feature := range s.unlisted {
		group := &libv1beta1.ConfigurationGroup{}
		group.Namespace, group.Name = lost.DeliveryNamespace, deliver.GroupName(lost, s.id(feature))
		if err := c.Hub.Delete(ctx, group); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete group %s: %w", client.ObjectKeyFromObject(group), err)
		}
	}
	return nil
}
