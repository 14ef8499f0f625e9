package shards

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
)

// setLabelled sets kube.AnnotationLabelledShard on cluster. It returns a conflict if the cluster has changed since it
// was read, since its shard may have changed.
func (c *Controller) setLabelled(ctx context.Context, cluster client.Object, shard string) error {
	changed := cluster.DeepCopyObject().(client.Object)
	annotations := changed.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[kube.AnnotationLabelledShard] = shard
	changed.SetAnnotations(annotations)
	patch := client.MergeFromWithOptions(cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("set annotation %s: %w", kube.AnnotationLabelledShard, err)
	}
	return nil
}

// labelSummaries labels the summaries of m. done is true if the cache has all of them with the label.
func (c *Controller) labelSummaries(ctx context.Context, m fleet.Member) (done bool, err error) {
	summaries := &metav1.PartialObjectMetadataList{}
	summaries.SetGroupVersionKind(configv1beta1.GroupVersion.WithKind(configv1beta1.ClusterSummaryKind + "List"))
	if err := c.Live.List(ctx, summaries, client.InNamespace(m.Namespace), client.MatchingLabels(ofMember(m))); err != nil {
		return false, fmt.Errorf("list summaries: %w", err)
	}
	done = true
	for i := range summaries.Items {
		summary := &summaries.Items[i]
		if err := c.labelSummary(ctx, summary); err != nil {
			return false, fmt.Errorf("label summary %s: %w", client.ObjectKeyFromObject(summary), err)
		}
		cached := &configv1beta1.ClusterSummary{}
		err := c.Hub.Get(ctx, client.ObjectKeyFromObject(summary), cached)
		if client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("read summary %s: %w", client.ObjectKeyFromObject(summary), err)
		}
		done = done && err == nil && c.Shard.HasLabel(cached)
	}
	return done, nil
}

// ofMember returns the labels of the summaries of m.
func ofMember(m fleet.Member) labels.Set {
	return labels.Set{libv1beta1.ClusterNameLabel: match.LabelValue(m.Name), libv1beta1.ClusterTypeLabel: string(m.Type)}
}

// labelSummary labels a summary if it does not have the label. It ignores a deleted summary.
func (c *Controller) labelSummary(ctx context.Context, summary client.Object) error {
	if c.Shard.HasLabel(summary) {
		return nil
	}
	summary.GetObjectKind().SetGroupVersionKind(configv1beta1.GroupVersion.WithKind(configv1beta1.ClusterSummaryKind))
	patch := client.MergeFromWithOptions(summary.DeepCopyObject().(client.Object), client.MergeFromWithOptimisticLock{})
	c.Shard.SetLabel(summary)
	err := c.Hub.Patch(ctx, summary, patch, client.FieldOwner(kube.FieldManager))
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// hasMislabelled returns whether a summary of m does not have the label of shard. The cache can be stale, so it reads a
// mislabelled summary again from the API server.
func (c *Controller) hasMislabelled(ctx context.Context, m fleet.Member, shard fleet.Shard) (bool, error) {
	var cached configv1beta1.ClusterSummaryList
	if err := c.Hub.List(ctx, &cached, client.MatchingFields{c.SummaryIndex: m.ID().String()}, client.UnsafeDisableDeepCopy); err != nil {
		return false, fmt.Errorf("list summaries: %w", err)
	}
	for i := range cached.Items {
		// labelSummaries cannot correct a summary without the labels ofMember, by which it lists summaries.
		if shard.HasLabel(&cached.Items[i]) || !ofMember(m).AsSelector().Matches(labels.Set(cached.Items[i].Labels)) {
			continue
		}
		summary := &configv1beta1.ClusterSummary{}
		err := c.Live.Get(ctx, client.ObjectKeyFromObject(&cached.Items[i]), summary)
		if client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("read summary %s: %w", client.ObjectKeyFromObject(&cached.Items[i]), err)
		}
		if err == nil && !shard.HasLabel(summary) {
			return true, nil
		}
	}
	return false, nil
}
