package unclaimed

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

const (
	// reasonKept is the reason of the condition for bundles that are kept.
	reasonKept = "NoWithdrawalOrder"
	// maxListed is the maximum number of bundles in a message, and of summaries in its command.
	maxListed = 20
)

// conditionsOf returns the conditions of a cluster object.
func conditionsOf(cluster client.Object) *[]metav1.Condition {
	switch cluster := cluster.(type) {
	case *libv1beta1.SveltosCluster:
		return &cluster.Status.Conditions
	case *clusterv1alpha1.Cluster:
		return &cluster.Status.Conditions
	default:
		return &[]metav1.Condition{}
	}
}

// patchCondition writes the condition of the cluster if it differs, and records an event if the message differs.
func (c *Controller) patchCondition(ctx context.Context, s *state) error {
	patched := s.cluster.DeepCopyObject().(client.Object)
	conditions := conditionsOf(patched)
	before := meta.FindStatusCondition(*conditions, libv1beta1.ConditionUnclaimedBundles)
	if len(s.kept) == 0 {
		if !meta.RemoveStatusCondition(conditions, libv1beta1.ConditionUnclaimedBundles) {
			return nil
		}
		return c.patchStatus(ctx, s, patched)
	}
	text := message(s.member, s.kept)
	isNew := before == nil || before.Message != text
	if !meta.SetStatusCondition(conditions, metav1.Condition{
		Type: libv1beta1.ConditionUnclaimedBundles, Status: metav1.ConditionTrue, Reason: reasonKept, Message: text,
		ObservedGeneration: patched.GetGeneration(),
	}) {
		return nil
	}
	if err := c.patchStatus(ctx, s, patched); err != nil {
		return err
	}
	if isNew {
		c.Events.Eventf(patched, nil, corev1.EventTypeWarning, libv1beta1.ConditionUnclaimedBundles, "Keep", "%s", text)
	}
	return nil
}

func (c *Controller) patchStatus(ctx context.Context, s *state, patched client.Object) error {
	// Optimistic locking: a merge patch replaces the whole list of conditions.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Status().Patch(ctx, patched, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("patch status of cluster %s: %w", s.member.Key(), err)
	}
	return nil
}

// message returns the condition message: the bundles that are kept on m, and the command that withdraws them.
func message(m fleet.Member, kept []locatedBundle) string {
	texts, names := make([]string, 0, len(kept)), []string{}
	for _, d := range kept {
		texts = append(texts, d.describe())
		if !slices.Contains(names, d.ID.RequestorName) {
			names = append(names, d.ID.RequestorName)
		}
	}
	if more := len(texts) - maxListed; more > 0 {
		texts = append(texts[:maxListed], fmt.Sprintf("%d more", more))
	}
	names = names[:min(len(names), maxListed)]
	return fmt.Sprintf("the cluster has bundles without a ClusterSummary: %s; to withdraw them, run: %s %s=%s",
		strings.Join(texts, ", "), annotateCommand(m), kube.AnnotationWithdraw, strings.Join(names, ","))
}

// Describe returns the description of a bundle in messages.
func Describe(d bundle.Deployed) string {
	text := d.ID.Feature + " of ClusterSummary " + d.ID.RequestorName
	if d.Owner.Kind != "" {
		text += fmt.Sprintf(" (%s %s)", d.Owner.Kind, d.Owner.Name)
	}
	return text
}

// describe returns Describe, followed by "on the hub" for a bundle on the hub.
func (l locatedBundle) describe() string {
	if l.isOnHub() {
		return Describe(l.Deployed) + " on the hub"
	}
	return Describe(l.Deployed)
}

// annotateCommand returns the kubectl command that annotates the cluster, without the annotation.
func annotateCommand(m fleet.Member) string {
	return map[fleet.Type]string{
		fleet.TypeSveltos: "kubectl annotate sveltosclusters.lib.projectsveltos.io --namespace=" + m.Namespace + " " + m.Name,
		fleet.TypeKarmada: "kubectl annotate clusters.cluster.karmada.io " + m.Name,
	}[m.Type]
}
