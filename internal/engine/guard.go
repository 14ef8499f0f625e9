package engine

import (
	"errors"
	"fmt"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// errReplaced says that what is there now has to be judged anew.
var errReplaced = errors.New("somebody deleted or replaced it just now; it is looked at again")

// errBusy says that an object changes faster than it can be read and applied.
var errBusy = errors.New("it changes all the time; it is looked at again")

// guard decides, for a guarded bundle, about an object that is there and is not marked for it. What such a bundle takes over is the
// bundle's from then on, and goes with it.
func guard(v verdict, had inventory.Entry, who asker) verdict {
	v.adopt = false
	switch {
	case !v.seen.IsMarked() && (had.UID == v.seen.UID || managedFor(v.target, v.seen)):
		return v
	case !elsewhere(v.seen, who) && !v.overwrite:
		v.verb, v.err = refuse, unmanaged(v.target, v.seen)
		return v
	case !v.seen.IsMarked():
		return v
	}
	return takeOver(v, had, who)
}

// managedFor says whether an object came from the same Work as t, by whoever executed it.
func managedFor(t *target, seen *live) bool {
	if seen.Labels[workv1alpha1.ManagedLabel] != "true" {
		return false
	}
	wanted := mapOf(mapOf(t.content["metadata"])["annotations"])
	for _, name := range []string{workv1alpha1.WorkNameAnnotation, workv1alpha1.WorkNamespaceAnnotation} {
		if seen.Annotations[name] == "" || seen.Annotations[name] != wanted[name] {
			return false
		}
	}
	return true
}

// elsewhere says whether an object is marked for the same bundle by an engine of another scope of the same hub: the cluster was registered
// again.
func elsewhere(seen *live, who asker) bool {
	theirs := seen.OwnerScope()
	return seen.Requestor() == who.id.String() && theirs.Hub == who.ownerScope.Hub && theirs.Registration != who.ownerScope.Registration
}

// takeOver decides about an object that another delivery has marked and that this one may have: the last one to deliver something new has it.
// A pass that was cut off may go on, but not take back what was delivered elsewhere since.
func takeOver(v verdict, had inventory.Entry, who asker) verdict {
	if who.motive != delivered && (had.Claim == "" || had.Claim != v.seen.Version) {
		v.verb, v.err = refuse, contested(v.target, who.owner, v.seen.Requestor())
		return v
	}
	v.claim = v.seen.Version
	return v
}

// unmanaged is the conflict of a guarded bundle with what was there before it.
func unmanaged(t *target, seen *live) error {
	state := "is not managed"
	switch kind := seen.Annotations[kube.AnnotationOwnerKind]; {
	case kind != "":
		state = fmt.Sprintf("is deployed by %s %s", kind, seen.Annotations[kube.AnnotationOwnerName])
	case seen.Labels[workv1alpha1.ManagedLabel] == "true":
		state = fmt.Sprintf("has label %s, but not the annotations %s and %s of this Work", workv1alpha1.ManagedLabel,
			workv1alpha1.WorkNameAnnotation, workv1alpha1.WorkNamespaceAnnotation)
	}
	return &conflictError{ref: t.ref, text: fmt.Sprintf("%s already exists in the cluster and %s; annotation %s: %s takes it over",
		t.ref, state, workv1alpha1.ConflictResolutionAnnotation, workv1alpha1.ConflictOverwrite)}
}

// foreign is the conflict with an object that another hub deploys.
func foreign(t *target, seen *live) error {
	return &conflictError{ref: t.ref, text: fmt.Sprintf("%s already exists in the cluster and belongs to another hub (%s)", t.ref, seen.OwnerScope().Hub)}
}

// letGo says whether somebody took the label off an object of a Work that says that it is managed.
func (l *live) letGo() bool {
	return l.Annotations[workv1alpha1.WorkNameAnnotation] != "" && l.Labels[workv1alpha1.ManagedLabel] != "true"
}
