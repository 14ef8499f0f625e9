package engine

import (
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// ownership is the label and the annotations with which Towline records on an object who owns it.
type ownership struct {
	reason      string
	annotations map[string]string
}

// ownershipOf returns the ownership of an object of item in b, whose content has the given hash.
func ownershipOf(b bundle.Bundle, item bundle.Item, hash string) ownership {
	annotations := map[string]string{
		kube.AnnotationHash:      hash,
		kube.AnnotationRequestor: b.ID.String(),
		kube.AnnotationOwnerKind: b.Owner.Kind,
		kube.AnnotationOwnerName: b.Owner.Name,
		kube.AnnotationOwnerTier: formatTier(b.Owner.Tier),
	}
	if ref := item.Reference; ref.Kind != "" {
		annotations[kube.AnnotationReferenceKind] = ref.Kind
		annotations[kube.AnnotationReferenceNS] = ref.Namespace
		annotations[kube.AnnotationReferenceName] = ref.Name
		annotations[kube.AnnotationReferenceTier] = formatTier(ref.Tier)
	}
	return ownership{reason: b.ID.Feature, annotations: annotations}
}

// ownershipAnnotations returns the names of all ownership annotations, for their removal.
func ownershipAnnotations() []string {
	return []string{
		kube.AnnotationHash, kube.AnnotationRequestor, kube.AnnotationAdopted, kube.AnnotationHub, kube.AnnotationScope,
		kube.AnnotationOwnerKind, kube.AnnotationOwnerName, kube.AnnotationOwnerTier,
		kube.AnnotationReferenceKind, kube.AnnotationReferenceNS, kube.AnnotationReferenceName, kube.AnnotationReferenceTier,
	}
}

// isOn returns whether an object has this ownership label and these annotations.
func (o ownership) isOn(existing *live) bool {
	if existing.Labels[kube.LabelReason] != o.reason {
		return false
	}
	for name, want := range o.annotations {
		if got, ok := existing.Annotations[name]; !ok || got != want {
			return false
		}
	}
	return true
}

func formatTier(tier int32) string { return strconv.FormatInt(int64(tier), 10) }

func parseTier(text string) int32 {
	tier, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		return bundle.DefaultTier
	}
	return int32(tier)
}

// maxOwnershipSize limits the labels and the annotations of an existing object that are kept, in bytes. Valid ones
// are shorter: a reference to a URL, and at most 2 KiB of others.
const maxOwnershipSize = 8 << 10

// live is the metadata of an existing object, with the labels and annotations that the engine uses.
type live struct {
	inventory.LiveMeta
	// hasOtherManager is true if other field managers than ours have set fields of the object. The aggregation controller
	// does not count: see roleRecreated.
	hasOtherManager bool
	role            roleState // roleOrdinary if it is no ClusterRole
	// hasPastManager is true if isPastManager is true for one of the field managers.
	hasPastManager bool
}

func liveOf(meta *metav1.PartialObjectMetadata) *live {
	existing := &live{LiveMeta: *inventory.LiveMetaOf(meta)}
	existing.Labels = selectNames(meta.Labels, []string{kube.LabelReason, workv1alpha1.ManagedLabel})
	existing.Annotations = selectNames(meta.Annotations, append(ownershipAnnotations(),
		kube.AnnotationDriftIgnore, kube.AnnotationKeep, annotationReleaseName, annotationReleaseNamespace, annotationRevisionDigest,
		workv1alpha1.WorkNameAnnotation, workv1alpha1.WorkNamespaceAnnotation))
	existing.hasPastManager = slices.ContainsFunc(meta.ManagedFields, isPastManager)
	existing.hasOtherManager = slices.ContainsFunc(meta.ManagedFields, func(entry metav1.ManagedFieldsEntry) bool {
		return entry.Manager != kube.FieldManager && entry.Manager != aggregationManager
	})
	return existing
}

// selectNames returns the labels or annotations of an object that are in names, or have the API group of Works as
// prefix. If they exceed maxOwnershipSize, it omits the last ones of names, and any of the Works.
func selectNames(all map[string]string, names []string) map[string]string {
	used, size := map[string]string{}, 0
	add := func(name string) {
		value, ok := all[name]
		if _, isUsed := used[name]; !ok || isUsed || size+len(name)+len(value) > maxOwnershipSize {
			return
		}
		used[name] = value
		size += len(name) + len(value)
	}
	for _, name := range names {
		add(name)
	}
	for name := range all {
		if strings.HasPrefix(name, workv1alpha1.GroupName+"/") {
			add(name)
		}
	}
	return used
}
