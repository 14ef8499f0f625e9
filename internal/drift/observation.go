package drift

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/inventory"
)

// observation is the state of one object that a watch has reported.
type observation struct {
	deleted bool
	// uid is empty if a list lacks the object.
	uid         types.UID
	fingerprint string
	signature   string
	// ignored is true if the drift of the object is not corrected, or the object is being deleted.
	ignored bool
}

// isDrifted returns whether an object differs from the entry in the record of a bundle with the given signature.
func isDrifted(entry inventory.Entry, o observation, signature string) bool {
	switch {
	case entry.Rival != "":
		return false
	case o.deleted:
		return o.uid == "" || entry.UID == "" || entry.UID == o.uid
	case o.ignored:
		return false
	case entry.IsReleaseRecord:
		// Clients of Helm remove the ownership labels, and entry may be older than the release record just written.
		return entry.UID != o.uid || entry.Fields != o.fingerprint
	case entry.UID != o.uid && o.signature != signature:
		return false // it belongs to others, and is not the object that was applied
	}
	return entry.UID != o.uid || entry.Fields != o.fingerprint || (o.signature != "" && o.signature != signature)
}
