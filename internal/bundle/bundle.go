package bundle

import (
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
)

// ID says what a bundle is for: one feature of one requestor. It is unique within a member.
type ID struct {
	RequestorKind string `json:"requestorKind"` // "ClusterSummary"
	RequestorName string `json:"requestorName"`
	Feature       string `json:"feature"` // "Resources" or "Helm"
}

// String prints the ID as kind/name/feature.
func (id ID) String() string {
	return strings.Join([]string{id.RequestorKind, id.RequestorName, id.Feature}, "/")
}

// Bundle is everything that one feature of one requestor wants on a member. It is a value: nobody changes it after it was made.
type Bundle struct {
	ID      ID      `json:"id"`
	Owner   Owner   `json:"owner"`
	Items   []Item  `json:"items"` // in the order in which they are applied
	Options Options `json:"options"`
	// Audience is how many pull members get the same content now; above one, content without secrets is stored once for all of them.
	// It is a hint and no part of the digest.
	Audience int `json:"-"`
	// Hub is the uid of the namespace kube-system of the hub that delivers the bundle, "" where that is not known. It is no part of the
	// digest: a member that changes its hub keeps what it has.
	Hub string `json:"-"`
	// KeepObjects says that the member seems to hold a newer bundle of this ID than the hub knows of, as after a restore of the hub: objects that
	// this one lacks are kept until everything is withdrawn.
	KeepObjects bool `json:"-"`
}

// Owner is the profile behind a bundle. It decides conflicts: the lower tier wins, the incumbent wins a tie.
type Owner struct {
	Kind string `json:"kind"` // ClusterProfile or Profile
	Name string `json:"name"` // namespaced owners are "namespace/name"
	Tier int32  `json:"tier"`
}

// DefaultTier is the tier of what names none: that of the Sveltos surface.
const DefaultTier = 100

// Item is a run of objects that came from one place.
type Item struct {
	Objects   []*unstructured.Unstructured `json:"objects"`
	Reference Reference                    `json:"reference,omitzero"`
	Release   *Release                     `json:"release,omitempty"` // set for objects of a Helm release
	// Sensitive says that the content holds a Secret or came from one: it stays in the member's own delivery namespace.
	Sensitive             bool `json:"sensitive,omitempty"`
	SkipNamespaceCreation bool `json:"skipNamespaceCreation,omitempty"`
	Force                 bool `json:"force,omitempty"` // delete and create again when an immutable field changed
	// Problem says why objects of this item could not be made out, "" if all are there. It counts as a failure, so that nothing is pruned.
	Problem string `json:"problem,omitempty"`
	// Overwrite takes over, in a guarded bundle, what is there and is not managed.
	Overwrite bool `json:"overwrite,omitempty"`
}

// Reference is the hub object that an item was read from.
type Reference struct {
	Kind      string `json:"kind,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	Tier      int32  `json:"tier,omitempty"`
}

// Options say how a bundle is applied.
type Options struct {
	ContinueOnConflict bool `json:"continueOnConflict,omitempty"`
	// ContinueOnError applies the remaining objects after one failed. It also prunes after a failure: an object is pruned
	// if all objects of the same reference or release are applied, since a failed object may be its replacement. Namespaces and
	// CustomResourceDefinitions are pruned only if no object failed. Without this option, or with a Problem, nothing is
	// pruned after a failure.
	ContinueOnError bool `json:"continueOnError,omitempty"`
	// Heal puts back what others changed or deleted, without a new delivery.
	Heal bool `json:"heal,omitempty"`
	// Guarded leaves alone what is on the member and was not made from this bundle: such an object is an error, unless its item says
	// Overwrite. What is there twice is applied once. The content carries the marks of the Work it comes from; they say what is managed, too.
	Guarded bool `json:"guarded,omitempty"`
}

// Withdrawal asks to take everything that ID put on a member away again.
type Withdrawal struct {
	ID ID
	// Leave keeps the objects and strips our marks.
	Leave bool
}

// Refs lists the objects of b in order, as they are written there.
func (b Bundle) Refs() []kube.Ref {
	var refs []kube.Ref
	for _, item := range b.Items {
		for _, obj := range item.Objects {
			refs = append(refs, kube.RefOf(obj))
		}
	}
	return refs
}

// Sensitive says whether any item of b is.
func (b Bundle) Sensitive() bool {
	for _, item := range b.Items {
		if item.Sensitive {
			return true
		}
	}
	return false
}
