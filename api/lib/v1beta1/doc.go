// Package v1beta1 holds the types of the API group lib.projectsveltos.io: clusters, and the content that is delivered
// to them.
//
// Pointer fields and fields tagged omitempty or omitzero are optional. A default named in a comment is filled in by the
// API server, so it is also what a stored object shows. Durations are written as Go durations ("90s", "1h30m").
//
// +kubebuilder:object:generate=true
// +groupName=lib.projectsveltos.io
package v1beta1
