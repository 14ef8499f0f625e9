package inventory

import (
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// OwnerScope separates the objects of this engine from objects of engines of other hubs or other registrations on the
// same cluster. SveltosClusters have the zero OwnerScope: as with Sveltos, a cluster is managed by one hub then.
type OwnerScope struct {
	// Hub identifies the hub, and Registration the object on it that declares the cluster.
	Hub, Registration string
}

// LocalScope returns the OwnerScope of what the shards of a hub deploy to the cluster of the hub on behalf of other
// clusters. All shards share it, so a shard that takes over a cluster also takes over these objects.
func LocalScope() OwnerScope { return OwnerScope{Registration: "Local"} }

// IsLocal returns whether s is LocalScope. In other scopes Registration is a UID, which is never "Local".
func (s OwnerScope) IsLocal() bool { return s == LocalScope() }

// Signature is the key of the owner of a bundle's objects: the bundle ID and the scope. An object that is marked for
// the bundle has the same LiveMeta.Signature.
func (s OwnerScope) Signature(id bundle.ID) string { return s.signatureOf(id.String()) }

func (s OwnerScope) signatureOf(requestor string) string {
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
