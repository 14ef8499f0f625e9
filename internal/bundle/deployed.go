package bundle

// Deployed describes a bundle that a member holds, or is asked to hold.
type Deployed struct {
	ID ID `json:"id"`
	// Owner is the profile behind the bundle; its Kind is empty where that is not known.
	Owner Owner `json:"owner,omitzero"`
	// Hub is the uid of the namespace kube-system of the hub that delivered the bundle, "" where that is not known.
	Hub string `json:"hub,omitempty"`
	// Removing says that the withdrawal of the bundle is in progress.
	Removing bool `json:"removing,omitempty"`
	// Leave says that this withdrawal leaves the objects on the member.
	Leave bool `json:"leave,omitempty"`
	// CorrectDrift says that the member keeps the objects as they were delivered.
	CorrectDrift bool `json:"-"`
	// Requested says that the hub has a ConfigurationGroup for the bundle, to deploy or to withdraw it.
	Requested bool `json:"-"`
	// Report is the last known report of the member.
	Report Report `json:"-"`
	// Releases are the Helm releases of the bundle as it was delivered last.
	Releases []DeployedRelease `json:"-"`
}

// DeployedRelease is a Helm release of a bundle that was delivered. Inputs, Revision and IsUpgrade are those of its Release; Revision may be set
// without Inputs.
type DeployedRelease struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Inputs    string `json:"inputs,omitempty"`
	Revision  int    `json:"revision,omitempty"`
	IsUpgrade bool   `json:"isUpgrade,omitempty"`
}

// DeployedReleases lists the Helm releases of b for its Deployed.
func (b Bundle) DeployedReleases() []DeployedRelease {
	var all []DeployedRelease
	for _, item := range b.Items {
		if release := item.Release; release != nil {
			all = append(all, DeployedRelease{
				Namespace: release.Namespace, Name: release.Name, Inputs: release.Inputs, Revision: release.Revision, IsUpgrade: release.IsUpgrade,
			})
		}
	}
	return all
}
