package summaries

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/status"
)

// generatedIndex finds the Secrets with generated values by the UID of a ClusterSummary that owns them.
const generatedIndex = "generatedFor"

// generatedOwnerUIDs returns the UIDs of the ClusterSummaries that own a Secret with generated values, none for another
// Secret.
func generatedOwnerUIDs(secret client.Object) []string {
	if secret.GetAnnotations()[releaseAnnotation] == "" {
		return nil
	}
	var uids []string
	for _, owner := range secret.GetOwnerReferences() {
		if owner.Kind == configv1beta1.ClusterSummaryKind {
			uids = append(uids, string(owner.UID))
		}
	}
	return uids
}

// The cluster and the summaries that render the release own the generated values. Because of the cluster, the garbage
// collector keeps the values while the release has no summary.

func clusterOwner(m fleet.Member) metav1.OwnerReference {
	cluster := fleet.Reference(m)
	return metav1.OwnerReference{APIVersion: cluster.APIVersion, Kind: cluster.Kind, Name: cluster.Name, UID: types.UID(m.UID)}
}

func summaryOwner(summary *configv1beta1.ClusterSummary) metav1.OwnerReference {
	return metav1.OwnerReference{
		APIVersion: configv1beta1.GroupVersion.String(), Kind: configv1beta1.ClusterSummaryKind, Name: summary.Name, UID: summary.UID,
	}
}

func isOwner(owners []metav1.OwnerReference, uid types.UID) bool {
	return slices.ContainsFunc(owners, func(o metav1.OwnerReference) bool { return o.UID == uid })
}

func addOwner(owners []metav1.OwnerReference, owner metav1.OwnerReference) []metav1.OwnerReference {
	if isOwner(owners, owner.UID) {
		return owners
	}
	return append(slices.Clone(owners), owner)
}

// cleanUpGenerated removes the summary from the owners of the generated values of its uninstalled releases. The other
// summaries with the same release become the owners. If there are none, the values are deleted. The values of an
// orphaned release are kept, unless its cluster is being deregistered.
func (c *Controller) cleanUpGenerated(ctx context.Context, s *state) error {
	if s.cluster == nil || !s.isUninstallComplete() || s.orphansObjects() && !s.member.Deleting {
		return nil
	}
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("SecretList"))
	uid := client.MatchingFields{generatedIndex: string(s.summary.UID)}
	if err := c.metadata.List(ctx, list, client.InNamespace(s.member.Namespace), uid); err != nil {
		return fmt.Errorf("list generated values: %w", err)
	}
	if len(list.Items) == 0 {
		return nil
	}
	loaded, err := c.loadClusterSummaries(ctx, s.summary)
	if err != nil {
		return err
	}
	for i := range list.Items {
		release := releaseOf(&list.Items[i])
		if !s.isDeleting() && slices.Contains(match.WantedReleases(loaded.summary), release) {
			continue
		}
		if err := c.setOwners(ctx, s, &list.Items[i], remainingOwners(s.summary, loaded.all, &list.Items[i])); err != nil {
			return fmt.Errorf("change the owners of the generated values of release %s: %w", release, err)
		}
	}
	return nil
}

// isUninstallComplete returns whether all releases that the summary no longer has are uninstalled from the member. If
// the summary still has releases, the member uninstalls the others when it applies the bundle.
func (s *state) isUninstallComplete() bool {
	const helm = libv1beta1.FeatureHelm
	switch {
	case s.isDeleting():
		return s.isWithdrawn
	case !s.specHas(helm):
		return !s.isOneTimeDone(helm) && (slices.Contains(s.removedFeatures, helm) || !slices.Contains(s.featuresToWithdraw(), helm))
	}
	isComposed := slices.ContainsFunc(s.compositions, func(c Composition) bool { return c.Feature == helm })
	return isComposed && status.FeatureOf(status.ComputeStatus(s.summary.Status, s.result), helm).Status == libv1beta1.FeatureStatusProvisioned
}

// releaseOf returns the release in the releaseAnnotation of a Secret.
func releaseOf(secret client.Object) match.Release {
	namespace, name, _ := strings.Cut(secret.GetAnnotations()[releaseAnnotation], "/")
	return match.Release{Namespace: namespace, Name: name}
}

// remainingOwners returns references to the other summaries in all that have the release or own the Secret. A summary
// that is being deleted stays an owner until its own reconcile removes it.
func remainingOwners(summary *configv1beta1.ClusterSummary, all []configv1beta1.ClusterSummary, secret client.Object) []metav1.OwnerReference {
	var owners []metav1.OwnerReference
	for i := range all {
		other := &all[i]
		wants := other.DeletionTimestamp.IsZero() && slices.Contains(match.WantedReleases(other), releaseOf(secret))
		if other.UID != summary.UID && (wants || isOwner(secret.GetOwnerReferences(), other.UID)) {
			owners = append(owners, summaryOwner(other))
		}
	}
	return owners
}

// setOwners replaces the summaries that own the Secret. It deletes the Secret if there are none. It fails with a
// conflict if the Secret has changed: another summary may use it now.
func (c *Controller) setOwners(ctx context.Context, s *state, secret *metav1.PartialObjectMetadata, summaries []metav1.OwnerReference) error {
	if len(summaries) == 0 {
		unchanged := client.Preconditions{UID: &secret.UID, ResourceVersion: &secret.ResourceVersion}
		return client.IgnoreNotFound(c.Hub.Delete(ctx, secret, unchanged))
	}
	changed := secret.DeepCopy()
	changed.OwnerReferences = append([]metav1.OwnerReference{clusterOwner(s.member)}, summaries...)
	patch := client.MergeFromWithOptions(secret, client.MergeFromWithOptimisticLock{})
	return client.IgnoreNotFound(c.Hub.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)))
}
