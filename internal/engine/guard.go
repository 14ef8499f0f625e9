package engine

import (
	"errors"
	"fmt"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// errReplaced says that what is there now has to be judged anew.
var errReplaced = errors.New("somebody deleted or replaced it just now; it is looked at again")

// errBusy says that an object changes faster than it can be read and applied.
var errBusy = errors.New("it changes all the time; it is looked at again")

// guard decides, for a guarded bundle, about an object that is there and is not marked for it. What such a bundle takes over is the
// bundle's from then on, and goes with it.
func guard(v verdict, had held, who asker) verdict {
	v.adopt = false
	switch {
	case !v.seen.marked() && (had.UID == v.seen.uid || managedFor(v.target, v.seen)):
		return v
	case !elsewhere(v.seen, who) && !v.overwrite:
		v.verb, v.err = refuse, unmanaged(v.target, v.seen)
		return v
	case !v.seen.marked():
		return v
	}
	return takeOver(v, had, who)
}

// managedFor says whether an object came from the same Work as t, by whoever executed it.
func managedFor(t *target, seen *live) bool {
	if seen.labels[workv1alpha1.ManagedLabel] != "true" {
		return false
	}
	wanted := mapOf(mapOf(t.content["metadata"])["annotations"])
	for _, name := range []string{workv1alpha1.WorkNameAnnotation, workv1alpha1.WorkNamespaceAnnotation} {
		if seen.annotations[name] == "" || seen.annotations[name] != wanted[name] {
			return false
		}
	}
	return true
}

// elsewhere says whether an object is marked for the same bundle by an engine of another scope of the same hub: the cluster was registered
// again.
func elsewhere(seen *live, who asker) bool {
	theirs := seen.domain()
	return seen.requestor() == who.id.String() && theirs.hub == who.domain.hub && theirs.scope != who.domain.scope
}

// takeOver decides about an object that another delivery has marked and that this one may have: the last one to deliver something new has it.
// A pass that was cut off may go on, but not take back what was delivered elsewhere since.
func takeOver(v verdict, had held, who asker) verdict {
	if who.motive != delivered && (had.Claim == "" || had.Claim != v.seen.version) {
		v.verb, v.err = refuse, contested(v.target, who.owner, v.seen.requestor())
		return v
	}
	v.claim = v.seen.version
	return v
}

// unmanaged is the conflict of a guarded bundle with what was there before it.
func unmanaged(t *target, seen *live) error {
	state := "is not managed"
	switch kind := seen.annotations[kube.AnnotationOwnerKind]; {
	case kind != "":
		state = fmt.Sprintf("is deployed by %s %s", kind, seen.annotations[kube.AnnotationOwnerName])
	case seen.labels[workv1alpha1.ManagedLabel] == "true":
		state = fmt.Sprintf("has label %s, but not the annotations %s and %s of this Work", workv1alpha1.ManagedLabel,
			workv1alpha1.WorkNameAnnotation, workv1alpha1.WorkNamespaceAnnotation)
	}
	return &conflictError{ref: t.ref, text: fmt.Sprintf("%s already exists in the cluster and %s; annotation %s: %s takes it over",
		t.ref, state, workv1alpha1.ConflictResolutionAnnotation, workv1alpha1.ConflictOverwrite)}
}

// foreign is the conflict with an object that another hub deploys.
func foreign(t *target, seen *live) error {
	return &conflictError{ref: t.ref, text: fmt.Sprintf("%s already exists in the cluster and belongs to another hub (%s)", t.ref, seen.domain().hub)}
}

// letGo says whether somebody took the label off an object of a Work that says that it is managed.
func (l *live) letGo() bool {
	return l.annotations[workv1alpha1.WorkNameAnnotation] != "" && l.labels[workv1alpha1.ManagedLabel] != "true"
}
