package engine

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// ErrConflict is wrapped by each error about an object that belongs to another bundle or hub, or to no bundle.
var ErrConflict = errors.New("conflict")

// errDeleting is the error of an object that is being deleted.
var errDeleting = errors.New("it is being deleted; it is created again after that")

// conflictError is the error of an object that another owner deploys.
type conflictError struct {
	ref   kube.Ref
	owner string
	// competingOwner is the bundle ID of the requestor that deploys the object for the same profile, "" if another profile
	// deploys it.
	competingOwner string
	// text is used instead of Sveltos' message.
	text string
}

// Error returns text, or the message that Sveltos has for a conflict.
func (e *conflictError) Error() string {
	if e.text != "" {
		return e.text
	}
	where := e.ref.Name
	if e.ref.Namespace != "" {
		where = e.ref.Namespace + "/" + e.ref.Name
	}
	return fmt.Sprintf("A conflict was detected while deploying resource %s:%s. The Sveltos profile currently deploying this resource is %s",
		e.ref.Kind, where, e.owner)
}

// Is makes errors.Is(err, ErrConflict) true.
func (e *conflictError) Is(target error) bool { return target == ErrConflict }

// action is the action for one object.
type action int

const (
	actionNone   action = iota // the object is up to date
	actionApply                // the object must be applied
	actionReject               // the object must not be applied; decision.err has the reason
)

// decision is the decision about one target.
type decision struct {
	*target
	action   action
	adopt    bool  // record on the object that it is adopted
	existing *live // nil if it does not exist
	// claim is the resourceVersion of existing if the run takes the object over from an earlier registration, or from a
	// bundle of the same profile for this cluster under an earlier name; "" otherwise.
	claim string
	// unread is true if it is not known whether the object exists.
	unread bool
	err    error
}

// runContext has the facts about a run that its decisions depend on.
type runContext struct {
	id         bundle.ID
	ownerScope inventory.OwnerScope
	owner      bundle.Owner
	trigger    trigger
	// isImpersonated is true if a ServiceAccount applies the objects. The engine can delete them with its own identity. It
	// must delete only objects that the ServiceAccount has created, since the rights of the ServiceAccount may allow it to
	// change an object, but not to delete it.
	isImpersonated bool
	// hasNewAccount is true if the objects were applied with another identity before.
	hasNewAccount bool
}

// ownerKey returns the key of the owner in the annotations of the bundle's objects.
func (r runContext) ownerKey() string { return r.ownerScope.OwnerKey(r.id) }

// trigger is the reason for a run.
type trigger int

const (
	triggerRequest  trigger = iota // the same bundle is requested again
	triggerDelivery                // the inventory has another bundle, or none
	triggerDrift                   // drift correction of the recorded bundle
)

// decide compares one target with the existing object and with its inventory entry.
func decide(t *target, existing *live, recorded inventory.Entry, run runContext) decision {
	v := decision{target: t, existing: existing, action: actionApply}
	if run.hasNewAccount {
		recorded.Fingerprint = "" // so that an object that has not changed is applied, too
	}
	if err := checkApplicable(t, existing, recorded, run); err != nil {
		v.action, v.err = actionReject, err
		return v
	}
	if existing == nil {
		if isExpiredJob(t, recorded, run) {
			v.action = actionNone
		}
		return v
	}
	return limitImpersonated(decideExisting(v, recorded, run), recorded, run)
}

// decideExisting is decide for a target that can be applied and exists.
func decideExisting(v decision, recorded inventory.Entry, run runContext) decision {
	t, existing := v.target, v.existing
	v.adopt = existing.IsAdopted()
	switch {
	case v.isLeftAlone():
		v.action, v.adopt = actionNone, v.adopt || recorded.WasAdoptedAs(existing.UID)
	case existing.OwnerKey() == run.ownerKey():
		v.adopt = v.adopt || recorded.WasAdoptedAs(existing.UID)
		if t.ownership.isOn(existing) && hasNotDrifted(existing, recorded) {
			v.action = actionNone
		}
	case existing.role == roleRecreated:
		// The aggregation controller created it again after a deletion: it is not adopted, and has no other owner.
	case t.rejectUnmanaged:
		return decideUnmanaged(v, recorded, run)
	case !existing.IsMarked():
		// The object with the recorded UID is ours, even if another client removed the labels and annotations. An object of
		// the same Helm release belongs to the release, so it is deleted with it.
		v.adopt = (recorded.UID != existing.UID || recorded.Adopted) && !existing.belongsToRelease(t.release)
	case isFromOtherRequestor(t, existing, run), isFromOtherScope(existing, run):
		return decideTakeover(v, recorded, run)
	default:
		if owner, keeps := currentOwner(t, existing, run.owner); keeps {
			v.action, v.err = actionReject, &conflictError{ref: t.ref, owner: owner}
		}
	}
	return v
}

// limitImpersonated limits the decision to apply an existing object as a ServiceAccount. Unless the object has the
// recorded UID, its ownership labels may be forged. So it counts as adopted, and is never deleted. Labels of another
// bundle are a conflict.
func limitImpersonated(v decision, recorded inventory.Entry, run runContext) decision {
	if !run.isImpersonated || v.action != actionApply || recorded.UID == v.existing.UID {
		return v
	}
	v.adopt = true
	if v.existing.IsMarked() && v.existing.Requestor() != run.id.String() {
		owner, _ := currentOwner(v.target, v.existing, run.owner)
		v.action, v.adopt, v.err = actionReject, false, &conflictError{ref: v.ref, owner: owner}
	}
	return v
}

// isExpiredJob returns whether a Job that does not exist was applied by this bundle before and has a
// ttlSecondsAfterFinished: Kubernetes has deleted it after its end. It runs again only with another bundle.
func isExpiredJob(t *target, recorded inventory.Entry, run runContext) bool {
	if t.ref.Kind != "Job" || t.ref.GVK().Group != "batch" || recorded.UID == "" || run.trigger == triggerDelivery {
		return false
	}
	_, expires, _ := unstructured.NestedFieldNoCopy(t.content, "spec", "ttlSecondsAfterFinished")
	return expires
}

// isLeftAlone returns whether an existing object of a createOnly target must not be changed: it was applied with other
// content or by another owner, so its hash annotation differs.
func (v decision) isLeftAlone() bool {
	return v.createOnly && v.existing != nil && v.existing.Annotations[kube.AnnotationHash] != v.ownership.annotations[kube.AnnotationHash]
}

// checkApplicable returns an error if a target cannot be applied now, independent of the owner of the existing object.
func checkApplicable(t *target, existing *live, recorded inventory.Entry, run runContext) error {
	switch {
	case t.resource == (kube.Resource{}):
		return errUnknownKind
	case existing != nil && existing.OwnerScope().Hub != "" && existing.OwnerScope().Hub != run.ownerScope.Hub:
		return otherHubError(t, existing)
	case recorded.CompetingOwner != "" && run.trigger == triggerDrift && (existing == nil || existing.OwnerKey() != run.ownerKey()):
		// Another requestor took it over. Only a new delivery can take it back, also if it was deleted since.
		return competingOwnerError(t, run.owner, recorded.CompetingOwner)
	case existing != nil && existing.Deleting:
		return errDeleting
	}
	return nil
}

// hasNotDrifted returns whether an object with our labels is as we applied it. If another client changes one of our
// fields, the API server removes the field from our managed fields, and their fingerprint differs from the recorded
// one.
func hasNotDrifted(existing *live, recorded inventory.Entry) bool {
	return existing.IgnoresDrift() || (recorded.UID == existing.UID && recorded.Fingerprint == existing.Fingerprint())
}

// isFromOtherRequestor returns whether an object was deployed from the same source of the same profile for another
// requestor: this cluster was registered under another name. isFromOtherScope does so for an earlier registration under
// the same name. See decideTakeover.
func isFromOtherRequestor(t *target, existing *live, run runContext) bool {
	if existing.OwnerScope().IsLocal() || run.ownerScope.IsLocal() {
		// Local objects are of other clusters, so another requestor is no former name of this one.
		return false
	}
	if existing.Annotations[kube.AnnotationOwnerKind] != run.owner.Kind || existing.Annotations[kube.AnnotationOwnerName] != run.owner.Name ||
		existing.Requestor() == "" || existing.Labels[kube.LabelReason] != run.id.Feature {
		return false
	}
	for _, name := range []string{kube.AnnotationReferenceKind, kube.AnnotationReferenceNS, kube.AnnotationReferenceName} {
		if existing.Annotations[name] != t.ownership.annotations[name] {
			return false
		}
	}
	return true
}

// competingOwnerError returns the conflict with competingOwner about t.
func competingOwnerError(t *target, owner bundle.Owner, competingOwner string) error {
	err := &conflictError{ref: t.ref, owner: fmt.Sprintf("%s %s (for %s)", owner.Kind, owner.Name, competingOwner), competingOwner: competingOwner}
	if t.rejectUnmanaged {
		err.text = fmt.Sprintf("%s was taken over for %s", t.ref, competingOwner)
	}
	return err
}

// currentOwner returns the owner of an object of another bundle, and whether it keeps the object. The lower tier gets
// the object; with equal tiers the current owner keeps it. Two profiles compare their own tiers, two references of one
// profile compare the tiers of the references.
func currentOwner(t *target, existing *live, owner bundle.Owner) (current string, keeps bool) {
	kind, name := existing.Annotations[kube.AnnotationOwnerKind], existing.Annotations[kube.AnnotationOwnerName]
	current = fmt.Sprintf("%s %s", kind, name)
	if kind != owner.Kind || name != owner.Name {
		return current, owner.Tier >= parseTier(existing.Annotations[kube.AnnotationOwnerTier])
	}
	if existing.Requestor() == "" {
		return current, false // an older engine, which sets no requestor, deployed it for the same profile
	}
	if ref := existing.Annotations[kube.AnnotationReferenceName]; ref != "" {
		current += fmt.Sprintf(" (%s)", bundle.Reference{
			Kind: existing.Annotations[kube.AnnotationReferenceKind], Namespace: existing.Annotations[kube.AnnotationReferenceNS], Name: ref,
		})
	}
	if existing.OwnerScope().IsLocal() {
		current += " for " + existing.Requestor()
	}
	ours := parseTier(t.ownership.annotations[kube.AnnotationReferenceTier])
	return current, ours >= parseTier(existing.Annotations[kube.AnnotationReferenceTier])
}

// pruneAction is the action for an object that the bundle no longer has.
type pruneAction int

const (
	pruneForget pruneAction = iota // delete only the entry: the object does not exist or is not ours
	pruneDelete                    // delete the object
	pruneOrphan                    // keep the object, remove our labels and annotations
	pruneAwait                     // the object is being deleted already
)

// decidePrune returns the action for an entry that the bundle no longer has, and the reason if the object is kept. A
// ClusterRole that the aggregation controller created again is deleted, although its UID is not the recorded one.
func decidePrune(recorded inventory.Entry, existing *live, id bundle.ID, ownerScope inventory.OwnerScope) (pruneAction, string) {
	switch {
	case existing == nil:
		return pruneForget, ""
	case existing.role == roleRecreated:
		return pruneDelete, ""
	case recorded.UID != "" && recorded.UID != existing.UID:
		return pruneForget, "another client replaced it"
	case recorded.FromHelm && !existing.IsMarked() && existing.belongsToRelease(strings.TrimPrefix(recorded.Origin, originOfRelease(""))):
		if existing.Annotations[kube.AnnotationKeep] == "keep" {
			return pruneForget, "its " + kube.AnnotationKeep + " annotation says keep"
		}
		return pruneDelete, ""
	case existing.OwnerKey() != ownerScope.OwnerKey(id):
		return pruneForget, "it is no longer marked as deployed for " + id.String()
	case existing.IsAdopted(), recorded.WasAdoptedAs(existing.UID):
		return pruneOrphan, "it existed before"
	case existing.hasNoManagedLabel():
		return pruneOrphan, "its label " + workv1alpha1.ManagedLabel + " was removed"
	case existing.Annotations[kube.AnnotationKeep] == "keep":
		return pruneOrphan, "its " + kube.AnnotationKeep + " annotation says keep"
	case existing.Deleting:
		return pruneAwait, ""
	}
	return pruneDelete, ""
}
