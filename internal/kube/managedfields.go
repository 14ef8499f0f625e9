package kube

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// DropManagedFields makes an update or a patch of obj delete its managed fields. The API server then records none of
// later updates either, until an apply. They are a third of the bytes of a ConfigurationGroup or a ClusterSummary, and
// an eighth of the time of a change on many clusters. It is for objects that only Towline writes: nobody needs to know
// who wrote which field. A write of a subresource ignores it.
func DropManagedFields(obj client.Object) { obj.SetManagedFields([]metav1.ManagedFieldsEntry{{}}) }
