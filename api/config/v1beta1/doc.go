// Package v1beta1 holds the types of the API group config.projectsveltos.io: profiles, and their state on clusters.
//
// Pointer fields and fields tagged omitempty or omitzero are optional. A default named in a comment is filled in by the
// API server, so it is also what a stored object shows. Durations are written as Go durations ("90s", "1h30m"). A field
// that Towline does not act on is never ignored: a profile that uses it is refused with a message that names the field.
//
// +kubebuilder:object:generate=true
// +groupName=config.projectsveltos.io
package v1beta1
