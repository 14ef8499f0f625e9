package fleet

import (
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// Shard is the name of the hubs that manage the same part of the fleet; "" is the default shard, which also manages the
// fleet as a whole.
type Shard string

// IsDefault returns true for the default shard.
func (s Shard) IsDefault() bool { return s == "" }

// Serves returns true if the shard manages cluster, which is the object that declares a member, or its metadata.
func (s Shard) Serves(cluster client.Object) bool {
	return Shard(cluster.GetAnnotations()[libv1beta1.ShardAnnotation]) == s
}

// Predicate admits events of clusters that the shard manages, including the event of a cluster that has left it. The
// controller must check Serves again.
func (s Shard) Predicate() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return s.Serves(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool { return s.Serves(e.ObjectOld) || s.Serves(e.ObjectNew) },
	}
}
