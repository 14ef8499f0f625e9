package deliver

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// LabelGroups sets the label of the shard on all groups of m. done is true when the cache has all of them with the
// label. The shard controller calls it again until then.
func (t *PullTransport) LabelGroups(ctx context.Context, m fleet.Member) (done bool, err error) {
	if m.Mode != fleet.Pull || m.DeliveryNamespace == "" {
		return true, nil
	}
	if err := t.checkClaim(ctx, m); err != nil && !errors.Is(err, errUnclaimed) {
		return false, fmt.Errorf("label groups of member %s: %w", m.Key(), err)
	}
	groups := &metav1.PartialObjectMetadataList{}
	groups.SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationGroupKind + "List"))
	ofMember := client.MatchingLabels{libv1beta1.PullClusterNameLabel: labelValue(m.Name)}
	if err := t.live.List(ctx, groups, client.InNamespace(m.DeliveryNamespace), ofMember); err != nil {
		return false, fmt.Errorf("list groups of member %s: %w", m.Key(), err)
	}
	done = true
	for i := range groups.Items {
		group := &groups.Items[i]
		if err := t.labelGroup(ctx, group); err != nil {
			return false, fmt.Errorf("label group %s: %w", client.ObjectKeyFromObject(group), err)
		}
		cached := &libv1beta1.ConfigurationGroup{}
		err := t.hub.Get(ctx, client.ObjectKeyFromObject(group), cached)
		if client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("read group %s: %w", client.ObjectKeyFromObject(group), err)
		}
		done = done && err == nil && t.shard.HasLabel(cached)
	}
	return done, nil
}

// labelGroup sets the label of the shard on a group, unless the group has it or is deleted.
func (t *PullTransport) labelGroup(ctx context.Context, group client.Object) error {
	if t.shard.HasLabel(group) {
		return nil
	}
	group.GetObjectKind().SetGroupVersionKind(libv1beta1.GroupVersion.WithKind(libv1beta1.ConfigurationGroupKind))
	patch := client.MergeFromWithOptions(group.DeepCopyObject().(client.Object), client.MergeFromWithOptimisticLock{})
	t.shard.SetLabel(group)
	err := t.hub.Patch(ctx, group, patch, client.FieldOwner(kube.FieldManager))
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
