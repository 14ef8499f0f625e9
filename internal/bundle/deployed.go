package bundle

// Deployed describes a bundle that a member holds, or is asked to hold.
type Deployed struct {
	ID ID `json:"id"`
	// Owner is the profile that the bundle was made for; its Kind is empty if the profile is not known.
	Owner Owner `json:"owner,omitzero"`
	// Hub is the uid of the namespace kube-system of the hub that delivered the bundle, "" if it is not known.
	Hub string `json:"hub,omitempty"`
	// Removing is true while the bundle is withdrawn.
	Removing bool `json:"removing,omitempty"`
	// Orphan is true if this withdrawal leaves the objects on the member.
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

// DeployedRelease is a Helm release of a bundle that was delivered. Inputs, Revision, IsUpgrade and IsUnconfirmed are
// those of its Release. Without Inputs, Revision is the recorded revision, or 0 if it is not known.
type DeployedRelease struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Inputs    string `json:"inputs,omitempty"`
	Revision  int    `json:"revision,omitempty"`
	IsUpgrade bool   `json:"isUpgrade,omitempty"`

	IsUnconfirmed bool `json:"isUnconfirmed,omitempty"`
}

// DeployedReleases lists the Helm releases of b, as Deployed.Releases has them.
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
