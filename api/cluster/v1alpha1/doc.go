// Package v1alpha1 holds the kind of API group cluster.karmada.io: the cluster of a fleet as the Karmada surface
// declares it.
//
// Field names, values and their meaning are fixed by that surface, so manifests written for it work unchanged.
//
// +kubebuilder:object:generate=true
// +groupName=cluster.karmada.io
package v1alpha1
