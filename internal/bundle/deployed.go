package bundle

import (
	"regexp"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Deployed describes a bundle that a member has, or that its hub has requested.
type Deployed struct {
	ID ID `json:"id"`
	// Owner is the profile of the bundle; its Kind is empty if the profile is not known.
	Owner Owner `json:"owner,omitzero"`
	// Hub is the UID of the namespace kube-system of the hub that delivered the bundle, "" if it is not known.
	Hub string `json:"hub,omitempty"`
	// Removing is true while the bundle is withdrawn.
	Removing bool `json:"removing,omitempty"`
	// Orphan is true if this withdrawal keeps the objects on the member.
	Orphan bool `json:"leave,omitempty"`
	// CorrectDrift is true if the member corrects drift of the objects.
	CorrectDrift bool `json:"-"`
	// Requested is true if the hub has a ConfigurationGroup for the bundle, to deploy or to withdraw it.
	Requested bool `json:"-"`
	// Inputs is Bundle.Inputs of the bundle that was delivered last, "" if it is not known.
	Inputs string `json:"-"`
	// Report is the last known report of the member.
	Report Report `json:"-"`
	// Releases are the Helm releases of the bundle that was delivered last.
	Releases []DeployedRelease `json:"-"`
}

// objectName matches names of objects, and several of them with slashes between them. A shell reads each as one word.
var objectName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)*$`)

// HasValidNames returns whether the ID and the Owner have valid names of kinds, features and objects. A member can
// report any text, and the hub uses the names in requests, in labels and in the commands that it proposes to users.
func (d Deployed) HasValidNames() bool {
	for _, label := range []string{d.ID.RequestorKind, d.ID.Feature} {
		if label == "" || len(validation.IsValidLabelValue(label)) > 0 {
			return false
		}
	}
	isOwner := d.Owner.Kind == "" && d.Owner.Name == "" || objectName.MatchString(d.Owner.Kind) && objectName.MatchString(d.Owner.Name)
	return isOwner && objectName.MatchString(d.ID.RequestorName)
}

// DeployedRelease is a Helm release of a delivered bundle, with the fields of its Release. If Inputs is empty, Revision
// is the revision in the record of the bundle, or 0 if it is not known.
type DeployedRelease struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Inputs    string `json:"inputs,omitempty"`
	Revision  int    `json:"revision,omitempty"`
	IsUpgrade bool   `json:"isUpgrade,omitempty"`

	IsUnconfirmed bool `json:"isUnconfirmed,omitempty"`
}

// DeployedReleases returns the Helm releases of b for Deployed.Releases.
func (b Bundle) DeployedReleases() []DeployedRelease {
	var all []DeployedRelease
	for _, item := range b.Items {
		if release := item.Release; release != nil {
			all = append(all, DeployedRelease{
				Namespace: release.Namespace, Name: release.Name, Inputs: release.Inputs, Revision: release.Revision, IsUpgrade: release.IsUpgrade,
				IsUnconfirmed: release.IsUnconfirmed,
			})
		}
	}
	return all
}
