package engine

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
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
	if seen.labels[kube.LabelReason] != m.reason {
		return false
	}
	for name, want := range m.annotations {
		if got, ok := seen.annotations[name]; !ok || got != want {
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
	uid         types.UID
	version     string
	labels      map[string]string
	annotations map[string]string
	// fields is the fingerprint of the fields that our last apply set and nobody else has changed since; "" if there are none.
	fields string
	// shared says that others have set fields of the object too. The aggregation controller does not count: see roleRecreated.
	shared   bool
	deleting bool
	role     roleState // roleOwned if it is no ClusterRole
	// managers are all field managers of an object that a past manager has written, see isPastManager; nil for others.
	managers []metav1.ManagedFieldsEntry
}

func liveOf(meta *metav1.PartialObjectMetadata) *live {
	seen := &live{
		uid: meta.UID, version: meta.ResourceVersion, labels: meta.Labels, annotations: meta.Annotations,
		deleting: meta.DeletionTimestamp != nil,
	}
	if slices.ContainsFunc(meta.ManagedFields, isPastManager) {
		seen.managers = meta.ManagedFields
	}
	for _, entry := range meta.ManagedFields {
		if entry.Manager != kube.FieldManager {
			seen.shared = seen.shared || entry.Manager != aggregationManager
			continue
		}
		if ownApply(entry) {
			seen.fields = fingerprint(entry.FieldsV1.GetRawBytes())
		}
	}
	return seen
}

// ownApply says whether an entry lists the fields that our last apply set.
func ownApply(entry metav1.ManagedFieldsEntry) bool {
	return entry.Manager == kube.FieldManager && entry.Operation == metav1.ManagedFieldsOperationApply && entry.Subresource == "" &&
		entry.FieldsV1 != nil
}

// fingerprint is short, because a record holds one for each object: 64 bits are plenty to tell two states of one object apart.
func fingerprint(fields []byte) string {
	sum := sha256.Sum256(fields)
	return hex.EncodeToString(sum[:8])
}

// marked says whether anyone's marks are on the object, ours or another profile's.
func (l *live) marked() bool {
	return l.labels[kube.LabelReason] != "" || l.annotations[kube.AnnotationOwnerKind] != "" || l.annotations[kube.AnnotationRequestor] != ""
}

func (l *live) requestor() string { return l.annotations[kube.AnnotationRequestor] }

func (l *live) adopted() bool { return l.annotations[kube.AnnotationAdopted] == "true" }

// ignoresDrift says whether its annotations exclude an object from drift detection: the key alone counts, but for an explicit "false".
func ignoresDrift(annotations map[string]string) bool {
	value, ok := annotations[kube.AnnotationDriftIgnore]
	return ok && value != "false"
}
