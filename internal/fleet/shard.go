package fleet

import (
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// Shard names the hubs that look after the same part of the fleet; "" is the default one, which also looks after the fleet as a whole.
type Shard string

// Default says whether s is the default shard.
func (s Shard) Default() bool { return s == "" }

// Serves says whether the hubs of s look after cluster, which is the object that declares a member, or its metadata.
func (s Shard) Serves(cluster client.Object) bool {
	return Shard(cluster.GetAnnotations()[libv1beta1.ShardAnnotation]) == s
}

// Concerned passes news of clusters that s looks after, that one has left s included. The controller that gets it must ask Serves again: by
// then the cluster may be another shard's.
func (s Shard) Concerned() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return s.Serves(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool { return s.Serves(e.ObjectOld) || s.Serves(e.ObjectNew) },
	}
}
