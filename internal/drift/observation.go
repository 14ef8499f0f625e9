package drift

import (
	"crypto/sha256"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// observation is the state of one object in a watch event or a list.
type observation struct {
	deleted bool
	// uid is "" if a list does not contain the object.
	uid          types.UID
	fingerprint  string // LiveMeta.Fingerprint
	ownerKeyHash string // the hash of LiveMeta.OwnerKey
	// ignored is true if the object is being deleted, or an annotation excludes it from drift detection.
	ignored bool
}

// observationOf returns the observation of an object that exists.
func observationOf(meta *metav1.PartialObjectMetadata) observation {
	live := inventory.LiveMetaOf(meta)
	return observation{
		uid: live.UID, fingerprint: live.Fingerprint(), ownerKeyHash: hashOwnerKey(live.OwnerKey()),
		ignored: live.Deleting || live.IgnoresDrift(),
	}
}

// hashOwnerKey returns a short hash of an owner key, "" for "". Owner keys come from annotations, which can be long.
func hashOwnerKey(ownerKey string) string {
	if ownerKey == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(ownerKey))
	return string(sum[:8])
}

// size returns the memory of the strings of o, in bytes.
func (o observation) size() int { return len(o.uid) + len(o.fingerprint) + len(o.ownerKeyHash) }

// listedObject is an object of a list. It is a runtime.Object for the reflector.
type listedObject struct {
	key kube.Ref
	observation
}

// GetObjectKind returns no kind.
func (*listedObject) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject returns a copy.
func (o *listedObject) DeepCopyObject() runtime.Object {
	copied := *o
	return &copied
}

// isDrifted returns whether an object differs from its entry in the record of a bundle. ownerKeyHash is the hash of the
// owner key of the bundle.
func isDrifted(entry inventory.Entry, o observation, ownerKeyHash string) bool {
	switch {
	case entry.CompetingOwner != "":
		return false // another bundle deploys the object; drift correction does not take it back, even if it is deleted
	case o.deleted:
		// An object with another UID is not the applied one. Without a UID in the entry, the object must still be created.
		return o.uid == "" || entry.UID == "" || entry.UID == o.uid
	case o.ignored:
		return false
	case entry.IsHelmSecret:
		// The owner key is not compared, because clients of Helm remove it. The entry can be older than the last write of
		// the release record by Towline: the worker compares again.
		return entry.UID != o.uid || entry.Fingerprint != o.fingerprint
	case entry.UID != o.uid && o.ownerKeyHash != ownerKeyHash:
		return false // an object of another owner, or without an owner key, has replaced the applied one
	}
	// The removal of the owner key changes the fingerprint. An apply for another bundle may not: Towline is the field
	// manager then, too.
	return entry.UID != o.uid || entry.Fingerprint != o.fingerprint || (o.ownerKeyHash != "" && o.ownerKeyHash != ownerKeyHash)
}
