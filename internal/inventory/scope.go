package inventory

import (
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// OwnerScope separates the objects of this engine from the objects of other hubs and registrations on the same cluster.
// It is zero for a SveltosCluster, which only one hub may manage, as with Sveltos.
type OwnerScope struct {
	// Hub identifies the hub, and Registration the object on it that declares the cluster.
	Hub, Registration string
}

// LocalScope returns the OwnerScope of the objects that a hub deploys to its own cluster on behalf of other clusters.
// All shards share it, so a shard that takes over a cluster also takes over these objects.
func LocalScope() OwnerScope { return OwnerScope{Registration: "Local"} }

// IsLocal returns whether s is LocalScope. In other scopes Registration is a UID, which is never "Local".
func (s OwnerScope) IsLocal() bool { return s == LocalScope() }

// OwnerKey identifies the owner of a bundle's objects: the bundle ID and the scope. LiveMeta.OwnerKey of an object with
// the ownership labels of the bundle is the same.
func (s OwnerScope) OwnerKey(id bundle.ID) string { return s.ownerKeyOf(id.String()) }

// ownerKeyOf is OwnerKey for a bundle ID as text.
func (s OwnerScope) ownerKeyOf(requestor string) string {
	if s == (OwnerScope{}) || requestor == "" {
		return requestor
	}
	return requestor + " in " + s.Registration + " of " + s.Hub
}

// Annotate adds the annotations that name the scope to the annotations of an object.
func (s OwnerScope) Annotate(annotations map[string]string) {
	if s.Hub != "" {
		annotations[kube.AnnotationHub] = s.Hub
	}
	if s.Registration != "" {
		annotations[kube.AnnotationScope] = s.Registration
	}
}

// label returns the label value for the scope, "" for the zero OwnerScope.
func (s OwnerScope) label() string {
	if s == (OwnerScope{}) {
		return ""
	}
	return shortHash([]byte(s.Registration + " of " + s.Hub))
}

// hubLabel returns the label value for the hub, "" if there is none.
func (s OwnerScope) hubLabel() string {
	if s.Hub == "" {
		return ""
	}
	return shortHash([]byte(s.Hub))
}
