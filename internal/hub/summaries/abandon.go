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

// orphansObjects returns whether withdrawn objects stay on the member, without an owner.
func (s *state) orphansObjects() bool {
	return s.isDeleting() && (s.member.KeepAddons || s.spec().StopMatchingBehavior == configv1beta1.LeavePolicies)
}

// abandonReason returns the reason why objects stay on the cluster without a withdrawal, "" if they are withdrawn. The
// reason is the predicate of a sentence about the cluster. Objects stay if the cluster object does not exist, or if the
// cluster is deregistered by force and is unreachable or has exceeded the time limit.
func (c *Controller) abandonReason(ctx context.Context, s *state) (string, error) {
	if s.cluster == nil {
		return "is gone; nothing was withdrawn from it", nil
	}
	if !s.isDeleting() || !s.member.Forced || len(s.featuresToWithdraw()) == 0 {
		return "", nil
	}
	if s.member.Abandoned {
		return "leaves by force before everything is withdrawn from it", nil
	}
	away, err := c.UnreachableReason(ctx, s.cluster)
	if err != nil || away == "" {
		return "", err
	}
	return "is not reached and leaves by force; nothing was withdrawn from it", nil
}

// abandon completes the deletion of the summary without a withdrawal. It lists the objects that stay on the cluster in
// an event and on the cluster object, from which the deregistering command reads them.
func (c *Controller) abandon(ctx context.Context, s *state, why string) error {
	s.withdrawn = true
	s.removedFeatures = s.featuresToWithdraw()
	if len(s.removedFeatures) == 0 {
		return nil
	}
	if s.cluster != nil {
		left, err := c.listLeftObjects(ctx, s)
		if err != nil {
			return err
		}
		if s.cluster, err = join.RecordLeftBehind(ctx, c.Hub, s.cluster, left...); err != nil {
			return err
		}
	}
	c.recordEvent(s.summary, status.Abandoned(s.summary.Status, s.member, why))
	log.FromContext(ctx).Info("what was deployed on the cluster is left there", logkeys.Member, s.member.Key(), logkeys.Reason, why)
	return c.deleteGroups(ctx, s)
}

// listLeftObjects returns texts that name the objects of removedFeatures on the member, as far as they are known.
func (c *Controller) listLeftObjects(ctx context.Context, s *state) ([]string, error) {
	inventory := &configv1beta1.ClusterConfiguration{}
	if err := c.Live.Get(ctx, ConfigurationKey(s.member), inventory); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read what is deployed on cluster %s: %w", s.member.Key(), err)
	}
	var left []string
	owner := metav1.GetControllerOf(s.summary)
	for _, feature := range s.removedFeatures {
		listed := join.ListDeployed(inventory.Status, func(kind, profile string, f libv1beta1.FeatureID) bool {
			return owner != nil && kind == owner.Kind && profile == owner.Name && f == feature
		})
		if len(listed) == 0 && s.featureSummary(feature).LastAppliedTime == nil {
			// No object of it is in the ClusterConfiguration yet.
			listed = []string{fmt.Sprintf("what was delivered of %s of ClusterSummary %s", feature, client.ObjectKeyFromObject(s.summary))}
		}
		left = append(left, listed...)
	}
	return left, nil
}

// deleteGroups deletes the ConfigurationGroups of removedFeatures. They are in the delivery namespace of the cluster,
// or in the cluster's namespace if the delivery namespace is unknown. An agent keeps its objects if a group is deleted.
func (c *Controller) deleteGroups(ctx context.Context, s *state) error {
	lost := s.member
	if lost.DeliveryNamespace == "" {
		lost.DeliveryNamespace = lost.Namespace
	}
	for _, feature := range s.removedFeatures {
		group := &libv1beta1.ConfigurationGroup{}
		group.Namespace, group.Name = lost.DeliveryNamespace, deliver.GroupName(lost, s.bundleID(feature))
		if err := c.Hub.Delete(ctx, group); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete group %s: %w", client.ObjectKeyFromObject(group), err)
		}
	}
	return nil
}
