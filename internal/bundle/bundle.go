package bundle

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// ID identifies a bundle on a member: one feature of one requestor.
type ID struct {
	RequestorKind string `json:"requestorKind"` // for example "ClusterSummary"
	RequestorName string `json:"requestorName"`
	Feature       string `json:"feature"` // "Resources", "Helm" or "Kustomize"
}

// String returns kind/name/feature.
func (id ID) String() string {
	return strings.Join([]string{id.RequestorKind, id.RequestorName, id.Feature}, "/")
}

// Bundle is the desired state of one feature of one requestor on a member. Its objects are shared and must not be
// changed.
type Bundle struct {
	ID      ID      `json:"id"`
	Owner   Owner   `json:"owner"`
	Items   []Item  `json:"items"` // in the order in which they are applied
	Options Options `json:"options"`
	// SharedBy is the number of pull members with the same content. If it is above one, content that is not Sensitive is
	// stored once for all of them. It is a hint, and not part of the digest.
	SharedBy int `json:"-"`
	// Hub is the UID of the namespace kube-system of the hub that delivers the bundle, "" if it is not known. It is not
	// part of the digest, so a change of the hub alone changes nothing on the member.
	Hub string `json:"-"`
	// Inputs is the digest of the inputs that the bundle was built from, "" if they are not known. It is not part of the
	// bundle's digest.
	Inputs string `json:"-"`
	// KeepObjects is true if the member has probably a newer bundle of this ID than the hub: the hub was restored from a
	// backup. Then objects that this bundle lacks are kept until the bundle is withdrawn.
	KeepObjects bool `json:"-"`
	// KnownDigest is the digest of the bundle if it was calculated before, or zero. Reset it in a copy with other content.
	KnownDigest Digest `json:"-"`
}

// Owner is the profile of a bundle. Of two profiles with the same object, the one with the lower tier deploys it, and
// the current owner if the tiers are equal.
type Owner struct {
	Kind string `json:"kind"` // ClusterProfile or Profile
	Name string `json:"name"` // namespaced owners are "namespace/name"
	Tier int32  `json:"tier"`
}

// DefaultTier is the tier of a profile or reference that sets none, as in Sveltos.
const DefaultTier = 100

// Item is a list of objects from one reference or Helm release.
type Item struct {
	Objects   []*unstructured.Unstructured `json:"objects"`
	Reference Reference                    `json:"reference,omitzero"`
	Release   *Release                     `json:"release,omitempty"` // set for objects of a Helm release
	// Sensitive is true if the content has a Secret or is from a Secret. Such content is stored only in the member's own
	// delivery namespace.
	Sensitive             bool `json:"sensitive,omitempty"`
	SkipNamespaceCreation bool `json:"skipNamespaceCreation,omitempty"`
	Force                 bool `json:"force,omitempty"` // delete and create an object again if an immutable field changes
	// Subresources are applied after each object, for example "status". Their drift is not corrected. A member that does
	// not know the field calculates another digest, and rejects the bundle.
	Subresources []string `json:"subresources,omitempty"`
	// DecodeError is set if some objects of this item could not be decoded. It counts as a failure, so nothing is pruned.
	DecodeError string `json:"problem,omitempty"`
	// Overwrite adopts existing objects that are not managed, in a bundle with the option RejectUnmanaged.
	Overwrite bool `json:"overwrite,omitempty"`
	// OnlySecretsPrivate is true if the item is Sensitive only because some of its objects are Secrets. The other objects
	// may be stored once for several members. It is a hint for the hub, and not part of the digest.
	OnlySecretsPrivate bool `json:"-"`
	// Documents caches the JSON of Objects, nil if it is not cached.
	Documents *kube.Documents `json:"-"`
}

// Reference is the hub object, or the URL, that an item was read from.
type Reference struct {
	Kind      string `json:"kind,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	Tier      int32  `json:"tier,omitempty"`
}

// String returns r for messages, for example "ConfigMap eu/web". A URL has no namespace.
func (r Reference) String() string {
	if r.Namespace == "" {
		return r.Kind + " " + r.Name
	}
	return r.Kind + " " + r.Namespace + "/" + r.Name
}

// Options are the options for applying a bundle.
type Options struct {
	ContinueOnConflict bool `json:"continueOnConflict,omitempty"`
	// ContinueOnError applies the remaining objects after a failure. It also prunes an object after a failure if all
	// objects of the same reference or release are applied: otherwise a failed object may be its replacement. Namespaces
	// and CustomResourceDefinitions are pruned only if no object failed. Without this option, or with a DecodeError,
	// nothing is pruned after a failure.
	ContinueOnError bool `json:"continueOnError,omitempty"`
	// CorrectDrift reverts changes and deletions by other clients without a new delivery.
	CorrectDrift bool `json:"heal,omitempty"`
	// RejectUnmanaged does not change existing objects that this bundle does not manage: such an object is an error,
	// unless its item has Overwrite. An object with the labels of the Work in the content is also managed. Of duplicate
	// objects the first one is applied.
	RejectUnmanaged bool `json:"guarded,omitempty"`
	// DriftExclusions are fields that are applied only to new objects: afterwards other clients may change them. A member
	// that does not know the option calculates another digest, and rejects the bundle.
	DriftExclusions []libv1beta1.DriftExclusion `json:"driftExclusions,omitempty"`
	// ServiceAccount is the "namespace/name" of the ServiceAccount of the member as which objects are applied and deleted,
	// "" for the engine's own identity. The engine always writes the inventory as itself. It also deletes objects as
	// itself if the ServiceAccount has created them and may no longer delete them, so that a withdrawal does not fail. A
	// member that does not know the option calculates another digest, and rejects the bundle.
	ServiceAccount string `json:"serviceAccount,omitempty"`
}

// ServiceAccountUser returns the user name to impersonate for an Options.ServiceAccount.
func ServiceAccountUser(account string) (string, error) {
	namespace, name, _ := strings.Cut(account, "/")
	if namespace == "" || name == "" {
		return "", fmt.Errorf("act as ServiceAccount %q: it is not namespace/name", account)
	}
	return "system:serviceaccount:" + namespace + ":" + name, nil
}

// Withdrawal is the request to remove all objects of a bundle from a member.
type Withdrawal struct {
	ID ID
	// Orphan keeps the objects and removes only the ownership labels.
	Orphan bool
	// ServiceAccount is the Options.ServiceAccount of the bundle, "" for the ServiceAccount in the record on the member.
	ServiceAccount string
}

// Refs returns references to the objects of b, in order.
func (b Bundle) Refs() []kube.Ref {
	var refs []kube.Ref
	for _, item := range b.Items {
		for _, obj := range item.Objects {
			refs = append(refs, kube.RefOf(obj))
		}
	}
	return refs
}

// Sensitive returns whether any item of b is sensitive.
func (b Bundle) Sensitive() bool {
	for _, item := range b.Items {
		if item.Sensitive {
			return true
		}
	}
	return false
}
