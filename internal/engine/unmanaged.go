package engine

import (
	"errors"
	"fmt"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// errReplaced is the error of an object that was created, deleted or replaced after it was read. The next run decides
// again.
var errReplaced = errors.New("it was deleted or replaced just now; it is read again")

// errBusy is the error of an object that changes faster than it can be read and applied.
var errBusy = errors.New("other clients change it too often; it is read again")

// decideUnmanaged decides about a target with rejectUnmanaged whose object exists without the ownership labels of this
// bundle. The run applies an object that lost its labels, and takes over an object of another scope. It takes over any
// other object only with overwrite. Such an object is not adopted: it is deleted with the bundle.
func decideUnmanaged(v decision, recorded inventory.Entry, run runContext) decision {
	v.adopt = false
	switch {
	case !v.existing.IsMarked() && (recorded.UID == v.existing.UID || isFromSameWork(v.target, v.existing)):
		return v
	case !isFromOtherScope(v.existing, run) && !v.overwrite:
		v.action, v.err = actionReject, unmanagedError(v.target, v.existing)
		return v
	case !v.existing.IsMarked():
		return v
	}
	return decideTakeover(v, recorded, run)
}

// isFromSameWork returns whether an object was applied for the same Work as t, by any agent.
func isFromSameWork(t *target, existing *live) bool {
	if existing.Labels[workv1alpha1.ManagedLabel] != "true" {
		return false
	}
	wanted := mapOf(mapOf(t.content["metadata"])["annotations"])
	for _, name := range []string{workv1alpha1.WorkNameAnnotation, workv1alpha1.WorkNamespaceAnnotation} {
		if existing.Annotations[name] == "" || existing.Annotations[name] != wanted[name] {
			return false
		}
	}
	return true
}

// isFromOtherScope returns whether an object has the labels of the same bundle from another registration of this
// cluster with the same hub.
func isFromOtherScope(existing *live, run runContext) bool {
	theirs := existing.OwnerScope()
	return existing.Requestor() == run.id.String() && theirs.Hub == run.ownerScope.Hub && theirs.Registration != run.ownerScope.Registration
}

// decideTakeover decides about an object that an earlier requestor or registration has applied. A new delivery takes it
// over. A later run of the same delivery continues the takeover only if the object has not changed since (Claim):
// otherwise it may have been delivered again for the other owner.
func decideTakeover(v decision, recorded inventory.Entry, run runContext) decision {
	if run.trigger != triggerDelivery && (recorded.Claim == "" || recorded.Claim != v.existing.Version) {
		v.action, v.err = actionReject, competingOwnerError(v.target, run.owner, v.existing.Requestor())
		return v
	}
	v.claim = v.existing.Version
	return v
}

// unmanagedError returns the conflict of a bundle with RejectUnmanaged with an object that existed before.
func unmanagedError(t *target, existing *live) error {
	state := "is not managed"
	switch kind := existing.Annotations[kube.AnnotationOwnerKind]; {
	case kind != "":
		state = fmt.Sprintf("is deployed by %s %s", kind, existing.Annotations[kube.AnnotationOwnerName])
	case existing.Labels[workv1alpha1.ManagedLabel] == "true":
		state = fmt.Sprintf("has label %s, but not the annotations %s and %s of this Work", workv1alpha1.ManagedLabel,
			workv1alpha1.WorkNameAnnotation, workv1alpha1.WorkNamespaceAnnotation)
	}
	return &conflictError{ref: t.ref, text: fmt.Sprintf("%s already exists in the cluster and %s; annotation %s: %s takes it over",
		t.ref, state, workv1alpha1.ConflictResolutionAnnotation, workv1alpha1.ConflictOverwrite)}
}

// otherHubError returns the conflict with an object of another hub.
func otherHubError(t *target, existing *live) error {
	return &conflictError{ref: t.ref, text: fmt.Sprintf("%s already exists in the cluster and belongs to another hub (%s)", t.ref, existing.OwnerScope().Hub)}
}

// hasNoManagedLabel returns whether an object of a Work lacks the managed label: a user removed it, to keep the object.
func (l *live) hasNoManagedLabel() bool {
	return l.Annotations[workv1alpha1.WorkNameAnnotation] != "" && l.Labels[workv1alpha1.ManagedLabel] != "true"
}
