package engine

import (
	"errors"
	"fmt"
	"strings"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// ErrConflict is in every error about an object that another profile deploys.
var ErrConflict = errors.New("conflict")

// errDeleting says that an object is on its way out: it can be created again once it is gone.
var errDeleting = errors.New("it is being deleted; it is created again once it is gone")

// conflictError names the object and who deploys it now.
type conflictError struct {
	ref   kube.Ref
	owner string
	// rival is the requestor that deploys the object for the same profile, "" if another profile does.
	rival string
	// text says it otherwise than the Sveltos surface does.
	text string
}

// Error is the sentence that the Sveltos surface promises, or the conflict's own.
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

// verb is what has to be done with one object.
type verb int

const (
	keep   verb = iota // it is as it should be
	write              // apply it
	refuse             // it cannot be applied; verdict.err says why
)

// verdict is the decision about one target.
type verdict struct {
	*target
	verb  verb
	adopt bool  // mark it as there before us
	seen  *live // nil if it does not exist
	// claim is the version of seen that is taken over from the same profile's delivery to this cluster under another name, "" if it is not.
	claim string
	// unread says that the server did not tell whether the object exists.
	unread bool
	err    error
}

// asker is who wants a target, and why now.
type asker struct {
	id         bundle.ID
	ownerScope inventory.OwnerScope
	owner      bundle.Owner
	motive     motive
}

// sign is in the marks of what the asker has.
func (a asker) sign() string { return a.ownerScope.Signature(a.id) }

// motive is why a pass runs.
type motive int

const (
	asked     motive = iota // the same bundle is asked for again
	delivered               // the record holds another bundle, or none
	healing                 // nobody asks: the record alone says so
)

// decide compares one target with what is there and with what the record holds of it.
func decide(t *target, seen *live, had inventory.Entry, who asker) verdict {
	v := verdict{target: t, seen: seen, verb: write}
	if err := hindrance(t, seen, had, who); err != nil {
		v.verb, v.err = refuse, err
		return v
	}
	if seen == nil {
		return v
	}
	v.adopt = seen.IsAdopted()
	switch {
	case seen.Signature() == who.sign():
		v.adopt = v.adopt || had.RecordsAdoption(seen.UID)
		if t.marks.on(seen) && undrifted(seen, had) {
			v.verb = keep
		}
	case seen.role == roleRecreated:
		// It has no content of anybody: it was neither there before us nor does it belong to somebody else.
	case t.guarded:
		return guard(v, had, who)
	case !seen.IsMarked():
		// The object in our record under this UID is what it was when we applied it, even if somebody took the marks
		// off.
		v.adopt = (had.UID != seen.UID || had.Adopted) && !seen.belongsTo(t.release)
	case rivals(t, seen, who), elsewhere(seen, who):
		return takeOver(v, had, who)
	default:
		if owner, ok := incumbent(t, seen, who.owner); ok {
			v.verb, v.err = refuse, &conflictError{ref: t.ref, owner: owner}
		}
	}
	return v
}

// hindrance says why a target cannot be applied now, whoever has marked what is there; nil if nothing is in the way.
func hindrance(t *target, seen *live, had inventory.Entry, who asker) error {
	switch {
	case t.resource == (kube.Resource{}):
		return errUnknownKind
	case seen != nil && seen.OwnerScope().Hub != "" && seen.OwnerScope().Hub != who.ownerScope.Hub:
		return foreign(t, seen)
	case had.Rival != "" && who.motive == healing && (seen == nil || seen.Signature() != who.sign()):
		// It was taken over, whatever became of it then: only who delivers for this requestor can know that it is wanted again.
		return contested(t, who.owner, had.Rival)
	case seen != nil && seen.Deleting:
		return errDeleting
	}
	return nil
}

// undrifted says whether an object that carries our marks is still as we applied it. When somebody else changes a field that we
// set, the server takes that field off our list of fields, whose fingerprint is in the record.
func undrifted(seen *live, had inventory.Entry) bool {
	return seen.IgnoresDrift() || (had.UID == seen.UID && had.Fields == seen.Fingerprint())
}

// rivals says whether an object was deployed from the same source and for the same profile, but for another requestor: the cluster was
// registered again under another name. The last one to deliver something new has the object; healing takes nothing back.
func rivals(t *target, seen *live, who asker) bool {
	if seen.Annotations[kube.AnnotationOwnerKind] != who.owner.Kind || seen.Annotations[kube.AnnotationOwnerName] != who.owner.Name ||
		seen.Requestor() == "" || seen.Labels[kube.LabelReason] != who.id.Feature {
		return false
	}
	for _, name := range []string{kube.AnnotationReferenceKind, kube.AnnotationReferenceNS, kube.AnnotationReferenceName} {
		if seen.Annotations[name] != t.marks.annotations[name] {
			return false
		}
	}
	return true
}

// contested is the conflict with rival over t.
func contested(t *target, owner bundle.Owner, rival string) error {
	err := &conflictError{ref: t.ref, owner: fmt.Sprintf("%s %s (for %s)", owner.Kind, owner.Name, rival), rival: rival}
	if t.guarded {
		err.text = fmt.Sprintf("%s was taken over for %s", t.ref, rival)
	}
	return err
}

// incumbent says who keeps an object that is marked as deployed by another bundle: its owner, unless ours goes first. The lower tier
// goes first, between profiles the profile's and within a profile the reference's; the incumbent wins a tie.
func incumbent(t *target, seen *live, owner bundle.Owner) (string, bool) {
	kind, name := seen.Annotations[kube.AnnotationOwnerKind], seen.Annotations[kube.AnnotationOwnerName]
	who := fmt.Sprintf("%s %s", kind, name)
	if kind != owner.Kind || name != owner.Name {
		return who, owner.Tier >= parseTier(seen.Annotations[kube.AnnotationOwnerTier])
	}
	if seen.Requestor() == "" {
		return "", false // an engine that marks only owners, working for the same profile
	}
	if ref := seen.Annotations[kube.AnnotationReferenceName]; ref != "" {
		who += fmt.Sprintf(" (%s %s/%s)", seen.Annotations[kube.AnnotationReferenceKind], seen.Annotations[kube.AnnotationReferenceNS], ref)
	}
	ours := parseTier(t.marks.annotations[kube.AnnotationReferenceTier])
	return who, ours >= parseTier(seen.Annotations[kube.AnnotationReferenceTier])
}

// fate is what happens to an object that the bundle no longer wants.
type fate int

const (
	forget fate = iota // it is gone, or no longer ours: only the record changes
	remove             // delete it
	strip              // keep it, take our marks off
	await              // it is being deleted already
)

// condemn decides what happens to an object of the record that is no longer wanted. The reason says why it is left alone.
// A ClusterRole that the aggregation controller created again is deleted too: its UID is not the recorded one.
func condemn(had inventory.Entry, seen *live, id bundle.ID, of inventory.OwnerScope) (fate, string) {
	switch {
	case seen == nil:
		return forget, ""
	case seen.role == roleRecreated:
		return remove, ""
	case had.UID != "" && had.UID != seen.UID:
		return forget, "somebody replaced it"
	case had.FromHelm && !seen.IsMarked() && seen.belongsTo(strings.TrimPrefix(had.Origin, originOfRelease(""))):
		if seen.Annotations[kube.AnnotationKeep] == "keep" {
			return forget, "its " + kube.AnnotationKeep + " annotation says keep"
		}
		return remove, ""
	case seen.Signature() != of.Signature(id):
		return forget, "it is no longer marked as deployed for " + id.String()
	case seen.IsAdopted(), had.RecordsAdoption(seen.UID):
		return strip, "it existed before"
	case seen.letGo():
		return strip, "its label " + workv1alpha1.ManagedLabel + " was taken off"
	case seen.Annotations[kube.AnnotationKeep] == "keep":
		return strip, "its " + kube.AnnotationKeep + " annotation says keep"
	case seen.Deleting:
		return await, ""
	}
	return remove, ""
}
