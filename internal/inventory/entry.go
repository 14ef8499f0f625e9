package inventory

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/kube"
)

// Entry is one object of a record.
type Entry struct {
	Ref kube.Ref `json:"ref"`
	// UID is empty while the object was only planned: it may exist or not.
	UID types.UID `json:"uid,omitempty"`
	// Fingerprint is the LiveMeta.Fingerprint of the object after the last apply.
	Fingerprint string `json:"fields,omitempty"`
	// Adopted is true if the object existed before it was applied: it is never deleted. If UID is empty, the object has
	// not been adopted yet. Records of earlier versions lack Adopted, so kube.AnnotationAdopted on the object counts too.
	Adopted bool `json:"adopted,omitempty"`
	// Kept is true if the bundle lacks the object and the object is not pruned: see bundle.Bundle.KeepObjects.
	Kept bool `json:"kept,omitempty"`
	// Origin is the Helm release or the referenced object of the hub that the object came from, "" if it came from
	// neither or that is not known.
	Origin string `json:"origin,omitempty"`
	// Claim is the resourceVersion at which the object is taken over from another owner, "" if it is not taken over.
	Claim string `json:"claimed,omitempty"`
	// FromHelm is true if Helm deployed the object, in a revision before the first one that Towline deployed.
	FromHelm bool `json:"fromHelm,omitempty"`
	// Recovered is true if the record was lost, and the entry was built again from labels of the object. Any client that
	// may change the object can set these labels.
	Recovered bool `json:"recovered,omitempty"`
	// IsHelmSecret is true for the entry that Record.FindTracked returns for a Helm release Secret. Such an entry is never
	// in Record.Entries.
	IsHelmSecret bool `json:"-"`
	// CompetingOwner is the bundle ID, as text, of another bundle that deploys the object now. The entry has no UID then.
	CompetingOwner string `json:"rival,omitempty"`
}

// WasAdoptedAs returns whether the object of the entry existed before it was applied, and may have this UID.
// While the entry has no UID, the caller must make sure that the object is marked for the bundle.
func (e Entry) WasAdoptedAs(uid types.UID) bool {
	return e.Adopted && (e.UID == "" || e.UID == uid)
}

// IsProvenApplied returns whether the entry proves that the bundle has applied the object with its UID: it was neither
// found by its labels nor deployed by Helm.
func (e Entry) IsProvenApplied() bool { return e.UID != "" && !e.Recovered && !e.FromHelm }
