package drift

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/inventory"
)

// observation is the state of one object in a watch event or a list.
type observation struct {
	deleted bool
	// uid is "" if a list does not contain the object.
	uid         types.UID
	fingerprint string
	signature   string // LiveMeta.Signature
	// ignored is true if the object is being deleted, or its drift is not corrected.
	ignored bool
}

// isDrifted returns whether an object differs from the entry in the record of a bundle: entry.Fields is the fingerprint
// of the object after the last apply. signature is OwnerScope.Signature of the bundle, and o.signature is the same key
// for the bundle that the object is marked for.
func isDrifted(entry inventory.Entry, o observation, signature string) bool {
	switch {
	case entry.Rival != "":
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
