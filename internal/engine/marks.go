package engine

import (
	"slices"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// marks are what Towline writes on an object beside its content.
type marks struct {
	reason      string
	annotations map[string]string
}

// marksOf returns the marks of an object of item in b, whose content has the given hash.
func marksOf(b bundle.Bundle, item bundle.Item, hash string) marks {
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
	return marks{reason: b.ID.Feature, annotations: annotations}
}

// markNames lists every annotation that can be a mark, for taking them all off.
func markNames() []string {
	return []string{
		kube.AnnotationHash, kube.AnnotationRequestor, kube.AnnotationAdopted, kube.AnnotationHub, kube.AnnotationScope,
		kube.AnnotationOwnerKind, kube.AnnotationOwnerName, kube.AnnotationOwnerTier,
		kube.AnnotationReferenceKind, kube.AnnotationReferenceNS, kube.AnnotationReferenceName, kube.AnnotationReferenceTier,
	}
}

// on says whether an object carries exactly these marks.
func (m marks) on(seen *live) bool {
	if seen.Labels[kube.LabelReason] != m.reason {
		return false
	}
	for name, want := range m.annotations {
		if got, ok := seen.Annotations[name]; !ok || got != want {
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

// live is what the engine knows of an object that exists: its metadata, no more.
type live struct {
	inventory.LiveMeta
	// shared says that others have set fields of the object too. The aggregation controller does not count: see roleRecreated.
	shared bool
	role   roleState // roleOwned if it is no ClusterRole
	// managers are all field managers of an object that a past manager has written, see isPastManager; nil for others.
	managers []metav1.ManagedFieldsEntry
}

func liveOf(meta *metav1.PartialObjectMetadata) *live {
	seen := &live{LiveMeta: *inventory.LiveMetaOf(meta)}
	if slices.ContainsFunc(meta.ManagedFields, isPastManager) {
		seen.managers = meta.ManagedFields
	}
	seen.shared = slices.ContainsFunc(meta.ManagedFields, func(entry metav1.ManagedFieldsEntry) bool {
		return entry.Manager != kube.FieldManager && entry.Manager != aggregationManager
	})
	return seen
}
