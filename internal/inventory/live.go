package inventory

import (
	"crypto/sha256"
	"encoding/hex"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/kube"
)

// LiveMeta is the part of an existing object's metadata that Towline uses.
type LiveMeta struct {
	UID         types.UID
	Version     string // the resourceVersion
	Labels      map[string]string
	Annotations map[string]string
	// FieldsDigest is a digest of the fields that Towline's last apply set and that no other client has changed since. It
	// is "" if there are none. Fingerprint uses it.
	FieldsDigest string
	Deleting     bool
}

// LiveMetaOf returns the LiveMeta of an object. A UID or resourceVersion that is too long is cut.
func LiveMetaOf(meta *metav1.PartialObjectMetadata) *LiveMeta {
	live := &LiveMeta{
		UID: types.UID(kube.Truncate(string(meta.UID), maxIdentifier)), Version: versionOf(meta),
		Labels: meta.Labels, Annotations: meta.Annotations, Deleting: meta.DeletionTimestamp != nil,
	}
	for _, entry := range meta.ManagedFields {
		if IsOwnApply(entry) {
			live.FieldsDigest = digestOf(entry.FieldsV1.GetRawBytes())
		}
	}
	return live
}

// Fingerprint identifies the state of the fields that Towline has set. It changes when another client changes one of
// them, since the API server then removes the field from Towline's managed fields. Without managed fields it is the
// resourceVersion, so it changes with each change of the object.
func (l *LiveMeta) Fingerprint() string {
	if l.FieldsDigest != "" {
		return l.FieldsDigest
	}
	return "version " + l.Version
}

// OwnerScope returns the scope that the annotations name. AnnotationScope has the registration.
func (l *LiveMeta) OwnerScope() OwnerScope {
	return OwnerScope{Hub: l.Annotations[kube.AnnotationHub], Registration: l.Annotations[kube.AnnotationScope]}
}

// OwnerKey returns the OwnerScope.OwnerKey of the bundle that the object is marked for, "" if it is not marked.
func (l *LiveMeta) OwnerKey() string { return l.OwnerScope().ownerKeyOf(l.Requestor()) }

// IsMarked returns whether the object has ownership labels or annotations, of any bundle.
func (l *LiveMeta) IsMarked() bool {
	return l.Labels[kube.LabelReason] != "" || l.Annotations[kube.AnnotationOwnerKind] != "" ||
		l.Annotations[kube.AnnotationRequestor] != ""
}

// Requestor returns the ID, as text, of the bundle that the object is marked for, "" if there is none.
func (l *LiveMeta) Requestor() string { return l.Annotations[kube.AnnotationRequestor] }

// IsAdopted returns whether the object is marked as one that existed before it was applied.
func (l *LiveMeta) IsAdopted() bool { return l.Annotations[kube.AnnotationAdopted] == "true" }

// IgnoresDrift returns whether an annotation excludes the object from drift detection: any value but "false" does.
func (l *LiveMeta) IgnoresDrift() bool {
	value, ok := l.Annotations[kube.AnnotationDriftIgnore]
	return ok && value != "false"
}

// IsOwnApply returns whether an entry lists the fields that Towline's last apply set.
func IsOwnApply(entry metav1.ManagedFieldsEntry) bool {
	return entry.Manager == kube.FieldManager && entry.Operation == metav1.ManagedFieldsOperationApply &&
		entry.Subresource == "" && entry.FieldsV1 != nil
}

// digestOf returns a digest of 64 bits. It is short because a record has one for each object.
func digestOf(fields []byte) string {
	sum := sha256.Sum256(fields)
	return hex.EncodeToString(sum[:8])
}
