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
}
