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
	uid         types.UID
	fingerprint string
	signature   string // the digest of LiveMeta.Signature
	// ignored is true if the object is being deleted, or its drift is not corrected.
	ignored bool
}

// observationOf returns the observation of an object that exists.
func observationOf(meta *metav1.PartialObjectMetadata) observation {
	live := inventory.LiveMetaOf(meta)
	return observation{
		uid: live.UID, fingerprint: live.Fingerprint(), signature: hashSignature(live.Signature()),
		ignored: live.Deleting || live.IgnoresDrift(),
	}
}

// hashSignature returns a short hash of a signature, "" for an empty one: the annotations of an object can be long.
func hashSignature(signature string) string {
	if signature == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(signature))
	return string(sum[:8])
}

// size returns how much memory o needs besides the struct, in bytes.
func (o observation) size() int { return len(o.uid) + len(o.fingerprint) + len(o.signature) }

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

// isDrifted returns whether an object differs from the entry in the record of a bundle: entry.Fields is the fingerprint
// of the object after the last apply. signature is the hash for this bundle, and o.signature the one for the bundle
// that the annotations of the object name, "" without them.
func isDrifted(entry inventory.Entry, o observation, signature string) bool {
	switch {
	case entry.CompetingOwner != "":
		return false
	case o.deleted:
		return o.uid == "" || entry.UID == "" || entry.UID == o.uid
	case o.ignored:
		return false
	case entry.IsReleaseRecord:
		// Clients of Helm remove the ownership labels. The entry can be older than the last write of the release record.
		return entry.UID != o.uid || entry.Fields != o.fingerprint
	case entry.UID != o.uid && o.signature != signature:
		return false // another owner's object has replaced the applied one
	}
	return entry.UID != o.uid || entry.Fields != o.fingerprint || (o.signature != "" && o.signature != signature)
}
