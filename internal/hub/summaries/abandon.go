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
// reason completes the sentence "cluster <name> …". Objects stay if the cluster object does not exist, or if the
// cluster is deregistered by force and is unreachable or has exceeded the time limit.
func (c *Controller) abandonReason(ctx context.Context, s *state) (string, error) {
	if s.cluster == nil {
		return "does not exist; nothing was withdrawn from it", nil
	}
	if !s.isDeleting() || !s.member.Forced || len(s.featuresToWithdraw()) == 0 {
		return "", nil
	}
	if s.member.Abandoned {
		return "is force-deregistered before everything is withdrawn from it", nil
	}
	unreachable, err := c.UnreachableReason(ctx, s.cluster)
	if err != nil || unreachable == "" {
		return "", err
	}
	return "is unreachable and is force-deregistered; nothing was withdrawn from it", nil
}

// abandon completes the deletion of the summary without a withdrawal. It writes the list of objects that stay on the
// cluster to an event and to the cluster object. The command that deregisters the cluster reads it there.
func (c *Controller) abandon(ctx context.Context, s *state, reason string) error {
	s.withdrawn = true
	s.removedFeatures = s.featuresToWithdraw()
	if len(s.removedFeatures) == 0 {
		return nil
	}
	if s.cluster != nil {
		remaining, err := c.listAbandonedObjects(ctx, s)
		if err != nil {
			return err
		}
		if s.cluster, err = join.RecordLeftBehind(ctx, c.Hub, s.cluster, remaining...); err != nil {
			return err
		}
	}
	c.recordEvent(s.summary, status.AbandonedEvent(s.summary.Status, s.member, reason))
	log.FromContext(ctx).Info("abandoned objects on the cluster", logkeys.Member, s.member.Key(), logkeys.Reason, reason)
	return c.deleteGroups(ctx, s)
}

// listAbandonedObjects returns one text for each object of removedFeatures on the member, as far as they are known.
func (c *Controller) listAbandonedObjects(ctx context.Context, s *state) ([]string, error) {
	deployed, err := c.Configurations.Read(ctx, s.member)
	if err != nil {
		return nil, err
	}
	var all []string
	owner := metav1.GetControllerOf(s.summary)
	for _, feature := range s.removedFeatures {
		listed := join.ListDeployed(deployed, func(kind, profile string, f libv1beta1.FeatureID) bool {
			return owner != nil && kind == owner.Kind && profile == owner.Name && f == feature
		})
		if len(listed) == 0 && s.featureSummary(feature).LastAppliedTime == nil {
			// No object of it is in the ClusterConfiguration yet.
			listed = []string{fmt.Sprintf("objects of feature %s of ClusterSummary %s, which are not listed yet", feature, client.ObjectKeyFromObject(s.summary))}
		}
		all = append(all, listed...)
	}
	return all, nil
}

// deleteGroups deletes the ConfigurationGroups of removedFeatures. They are in the delivery namespace of the cluster,
// or in the cluster's namespace if the delivery namespace is unknown. The agent does not remove objects when a group is
// deleted.
func (c *Controller) deleteGroups(ctx context.Context, s *state) error {
	member := s.member
	if member.DeliveryNamespace == "" {
		member.DeliveryNamespace = member.Namespace
	}
	for _, feature := range s.removedFeatures {
		group := &libv1beta1.ConfigurationGroup{}
		group.Namespace, group.Name = member.DeliveryNamespace, deliver.GroupName(member, s.bundleID(feature))
		if err := c.Hub.Delete(ctx, group); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete group %s: %w", client.ObjectKeyFromObject(group), err)
		}
	}
	return nil
}
