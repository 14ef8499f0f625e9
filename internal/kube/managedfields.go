package kube

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// DropManagedFields makes an update or a patch of obj delete its managed fields. The API server then records none for
// later updates either, until an apply. Managed fields are a third of the bytes of a ConfigurationGroup or a
// ClusterSummary, and an eighth of the time of a change on many clusters. Use it only for objects that no other client
// writes. A write of a subresource ignores it.
func DropManagedFields(obj client.Object) { obj.SetManagedFields([]metav1.ManagedFieldsEntry{{}}) }
