// Package v1alpha1 holds the kind of API group work.karmada.io: manifests for one cluster, as the Karmada surface
// declares them.
//
// Field names, values and their meaning are fixed by that surface, so manifests written for it work unchanged.
//
// +kubebuilder:object:generate=true
// +groupName=work.karmada.io
package v1alpha1
