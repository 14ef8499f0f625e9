package fleet

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// LabelShard is the label with the shard of a cluster, on the objects that Towline creates for the cluster. Objects of
// the default shard do not have it.
const LabelShard = "towline.dev/shard"

// BeingLabelled is the value of kube.AnnotationLabelledShard while a hub changes the shard labels of the objects of a
// cluster. It is not a valid shard key.
const BeingLabelled = "-"

// Shard is the key of a part of the fleet, and of the hubs that manage it. "" is the default shard, which also manages
// the fleet as a whole.
type Shard string

// IsDefault returns true for the default shard.
func (s Shard) IsDefault() bool { return s == "" }

// Serves returns true if the shard manages cluster, which is the object that declares a member, or its metadata.
func (s Shard) Serves(cluster client.Object) bool {
	return ShardOf(cluster) == s
}

// ShardOf returns the shard that manages cluster.
func ShardOf(cluster client.Object) Shard {
	return Shard(cluster.GetAnnotations()[libv1beta1.ShardAnnotation])
}

// SeesAll returns true if the shard manages cluster, and all ClusterSummaries and ConfigurationGroups of the cluster
// have the label of the shard. Otherwise the cache of the shard's hub can lack some of them.
func (s Shard) SeesAll(cluster client.Object) bool {
	return s.Serves(cluster) && s.AreObjectsLabelled(cluster)
}

// AreObjectsLabelled returns true if the objects of cluster have the label of the shard, even if another shard manages
// cluster. kube.AnnotationLabelledShard has the shard of the labels: without it, this is the default shard.
func (s Shard) AreObjectsLabelled(cluster client.Object) bool {
	labelled, ok := cluster.GetAnnotations()[kube.AnnotationLabelledShard]
	return labelled == string(s) && (ok || s.IsDefault())
}

// cacheMayLackObjects returns the value of Member.CacheMayLackObjects.
func cacheMayLackObjects(cluster client.Object) bool {
	_, isLabelled := cluster.GetAnnotations()[kube.AnnotationLabelledShard]
	return isLabelled || !Shard("").Serves(cluster)
}

// Label returns the value of LabelShard, which is the key of the shard. It is "" for the default shard, whose objects
// do not have the label. A key that is not a valid label is replaced by a hash; no hub runs with such a key.
func (s Shard) Label() string {
	if len(validation.IsValidLabelValue(string(s))) == 0 {
		return string(s)
	}
	sum := sha256.Sum256([]byte(s))
	return "invalid-" + hex.EncodeToString(sum[:16])
}

// SetLabel sets LabelShard on obj, or deletes it for the default shard.
func (s Shard) SetLabel(obj client.Object) {
	all := maps.Clone(obj.GetLabels())
	delete(all, LabelShard)
	if !s.IsDefault() {
		if all == nil {
			all = map[string]string{}
		}
		all[LabelShard] = s.Label()
	}
	obj.SetLabels(all)
}

// HasLabel returns true if obj has the label of the shard.
func (s Shard) HasLabel(obj client.Object) bool {
	return obj.GetLabels()[LabelShard] == s.Label()
}

// Selector selects the objects with the label of the shard.
func (s Shard) Selector() labels.Selector {
	operator, values := selection.DoesNotExist, []string(nil)
	if !s.IsDefault() {
		operator, values = selection.Equals, []string{s.Label()}
	}
	requirement, err := labels.NewRequirement(LabelShard, operator, values)
	if err != nil {
		panic(err) // the key and the value are valid
	}
	return labels.NewSelector().Add(*requirement)
}

// Predicate admits events of clusters that the shard manages, the event of a cluster that leaves it, and the deletions
// of all clusters: the controller must check Serves again.
func (s Shard) Predicate() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return s.Serves(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool { return s.Serves(e.ObjectOld) || s.Serves(e.ObjectNew) },
	}
}
