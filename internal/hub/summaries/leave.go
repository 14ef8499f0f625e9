package summaries

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/status"
)

// leave says whether what is withdrawn stays on the member, as nobody's.
func (s *state) leave() bool {
	return s.deleting() && (s.member.KeepAddons || s.spec().StopMatchingBehavior == configv1beta1.LeavePolicies)
}

// lost says of the cluster why nothing more is withdrawn from it and nobody is waited for, "" if that is not so: it is
// gone from the hub, or it is deregistered by force and is away, or does not let go in time.
func (c *Controller) lost(ctx context.Context, s *state) (string, error) {
	if s.cluster == nil {
		return "is gone; nothing was withdrawn from it", nil
	}
	if !s.deleting() || !s.member.Forced || len(s.leaving()) == 0 {
		return "", nil
	}
	if s.member.Abandoned {
		return "leaves by force before everything is withdrawn from it", nil
	}
	away, err := c.Away(ctx, s.cluster)
	if err != nil || away == "" {
		return "", err
	}
	return "is not reached and leaves by force; nothing was withdrawn from it", nil
}

// abandon lets go of a summary of a cluster that is lost. People are told what was left there: whoever follows the
// deregistration finds it on the cluster object, everybody in an event.
func (c *Controller) abandon(ctx context.Context, s *state, why string) error {
	s.free = true
	s.unlisted = s.leaving()
	if len(s.unlisted) == 0 {
		return nil
	}
	if s.cluster != nil {
		left, err := c.leftOn(ctx, s)
		if err != nil {
			return err
		}
		if s.cluster, err = join.RecordLeftBehind(ctx, c.Hub, s.cluster, left...); err != nil {
			return err
		}
	}
	c.tell(s.summary, status.Abandoned(s.summary.Status, s.member, why))
	log.FromContext(ctx).Info("what was deployed on the cluster is left there", logkeys.Member, s.member.Key(), logkeys.Reason, why)
	return c.dropGroups(ctx, s)
}

// leftOn lists, for people, what the features that are abandoned have on the member, as far as that is known.
func (c *Controller) leftOn(ctx context.Context, s *state) ([]string, error) {
	inventory := &configv1beta1.ClusterConfiguration{}
	if err := c.Live.Get(ctx, ConfigurationKey(s.member), inventory); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read what is deployed on cluster %s: %w", s.member.Key(), err)
	}
	var left []string
	owner := metav1.GetControllerOf(s.summary)
	for _, feature := range s.unlisted {
		listed := join.ListDeployed(inventory.Status, func(kind, profile string, f libv1beta1.FeatureID) bool {
			return owner != nil && kind == owner.Kind && profile == owner.Name && f == feature
		})
		if len(listed) == 0 && s.old(feature).LastAppliedTime == nil {
			// It never got so far that it was listed.
			listed = []string{fmt.Sprintf("what was delivered of %s of ClusterSummary %s", feature, client.ObjectKeyFromObject(s.summary))}
		}
		left = append(left, listed...)
	}
	return left, nil
}

// dropGroups deletes the groups of a cluster that is lost from the namespace of its deliveries, or, if that is not
// known any more, from its own. No agent takes that for a withdrawal.
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
