package summaries

import (
	"context"
	"fmt"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/status"
)

// orphansObjects returns whether a withdrawal keeps the objects on the cluster and only removes their ownership labels.
func (s *state) orphansObjects() bool {
	return s.isDeleting() && (s.member.KeepAddons || s.spec().StopMatchingBehavior == configv1beta1.LeavePolicies)
}

// isOrphaned returns whether the cluster object does not exist any more, and a withdrawal that orphans the objects of a
// feature has begun. While the cluster object exists, orphansObjects reads the option from it.
func (s *state) isOrphaned(feature libv1beta1.FeatureID) bool {
	deployed := s.deployed[feature]
	return s.cluster == nil && deployed.Removing && deployed.Orphan
}

// abandonReason returns the reason why objects stay on the cluster without a withdrawal, "" if they are withdrawn. The
// reason completes the sentence "cluster <name> …". Objects stay if the cluster object does not exist, or if the
// cluster is deregistered by force and is unreachable or has exceeded the time limit.
func (c *Controller) abandonReason(ctx context.Context, s *state) (string, error) {
	if s.cluster == nil {
		return "does not exist; nothing was withdrawn from it", nil
	}
	if !s.isDeleting() || !s.member.Forced || len(s.featuresToWithdraw()) == 0 && s.local.isWithdrawn {
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

// abandonment has the features whose objects stay on the cluster and on the hub, and the event to record.
type abandonment struct {
	onMember, onHub []libv1beta1.FeatureID
	event           status.Event
}

// abandon completes the deletion of the summary without a withdrawal. It writes the list of objects that stay on the
// cluster and on the hub to the cluster object, from which the command that deregisters the cluster reads the list.
func (c *Controller) abandon(ctx context.Context, s *state, reason string) error {
	onMember, onHub := s.featuresToWithdraw(), s.local.pendingWithdrawals()
	s.isWithdrawn, s.local.isWithdrawn = true, true
	if len(onMember)+len(onHub) == 0 {
		return nil
	}
	remaining, err := c.listAbandonedObjects(ctx, s, onMember)
	if err != nil {
		return err
	}
	remainingOnHub, err := c.listAbandonedObjects(ctx, s.local, onHub)
	if err != nil {
		return err
	}
	if s.cluster != nil {
		if s.cluster, err = fleet.RecordLeftBehind(ctx, c.Hub, s.cluster, slices.Concat(remaining, remainingOnHub)...); err != nil {
			return err
		}
	}
	var kinds []libv1beta1.FeatureDeploymentInfo
	if len(onMember) > 0 {
		kinds = s.summary.Status.DeployedGVKs
	}
	s.abandonment = &abandonment{onMember: onMember, onHub: onHub, event: status.AbandonedEvent(kinds, remainingOnHub, s.member, reason)}
	return c.deleteGroups(ctx, s, onMember)
}

// reportAbandoned records the event about the objects that stay, and deletes them from the ClusterConfiguration. It
// must be called after the finalizer is removed: until then, a reconcile can be repeated and reads the
// ClusterConfiguration again.
func (c *Controller) reportAbandoned(ctx context.Context, s *state) error {
	s.removedFeatures, s.local.removedFeatures = s.abandonment.onMember, append(s.local.removedFeatures, s.abandonment.onHub...)
	c.recordEvent(s.summary, s.abandonment.event)
	log.FromContext(ctx).Info("abandoned objects", logkeys.Member, s.member.Key(), logkeys.Reason, s.abandonment.event.Note)
	return c.recordDeployed(ctx, s)
}

// pendingWithdrawals returns the features to withdraw that this reconcile has not withdrawn yet.
func (s *state) pendingWithdrawals() []libv1beta1.FeatureID {
	if s.isWithdrawn {
		return nil
	}
	return slices.DeleteFunc(s.featuresToWithdraw(), func(f libv1beta1.FeatureID) bool { return slices.Contains(s.removedFeatures, f) })
}

// listAbandonedObjects describes the objects of features that the ClusterConfiguration lists, one text for each object
// or Helm release.
func (c *Controller) listAbandonedObjects(ctx context.Context, s *state, features []libv1beta1.FeatureID) ([]string, error) {
	if len(features) == 0 {
		return nil, nil
	}
	deployed, err := c.Configurations.Read(ctx, s.member)
	if err != nil {
		return nil, err
	}
	var all []string
	owner := ProfileOf(s.summary)
	for _, feature := range features {
		listed := status.ListDeployed(deployed, func(kind, profile string, f libv1beta1.FeatureID, on libv1beta1.DeploymentType) bool {
			return owner != nil && kind == owner.Kind && profile == owner.Name && f == feature && on == s.deploymentType()
		})
		if len(listed) == 0 && s.featureSummary(feature).LastAppliedTime == nil {
			// The feature was delivered, and its objects are not in the ClusterConfiguration yet.
			text := fmt.Sprintf("objects of feature %s of ClusterSummary %s, which are not listed yet", feature, client.ObjectKeyFromObject(s.summary))
			if s.isLocal() {
				text += ", on the hub"
			}
			listed = []string{text}
		}
		all = append(all, listed...)
	}
	return all, nil
}

// deleteGroups deletes the ConfigurationGroups of features. They are in the delivery namespace of the cluster, or in
// the cluster's namespace if the delivery namespace is unknown. The agent removes no objects when a group is deleted.
func (c *Controller) deleteGroups(ctx context.Context, s *state, features []libv1beta1.FeatureID) error {
	member := s.member
	if member.DeliveryNamespace == "" {
		member.DeliveryNamespace = member.Namespace
	}
	for _, feature := range features {
		group := &libv1beta1.ConfigurationGroup{}
		group.Namespace, group.Name = member.DeliveryNamespace, deliver.GroupName(member, s.bundleID(feature))
		if err := c.Hub.Delete(ctx, group); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete group %s: %w", client.ObjectKeyFromObject(group), err)
		}
	}
	return nil
}
