package works

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"reflect"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/client"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
)

// maxStatusBytes limits the total size of the object statuses in a Work, far below the limit of the API server (1.5
// MB). Statuses beyond it are omitted, and counted in the condition Applied. The health is always included.
const maxStatusBytes = 256 << 10

func appliedCondition() metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionTrue, Reason: workv1alpha1.ReasonAppliedSuccessful,
		Message: "Manifest has been successfully applied",
	}
}

func notAppliedCondition(applied, total int, message string) metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonAppliedFailed,
		Message: fmt.Sprintf("Failed to apply all manifests (%d/%d): %s", applied, total, message),
	}
}

// pendingCondition is for manifests that were not applied at all when the Work was suspended.
func pendingCondition() metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonSuspendDispatching,
		Message: "The current manifests were not applied before the Work was suspended",
	}
}

// interruptedCondition is for manifests that were not all applied when the Work was suspended.
func interruptedCondition(message string) metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonAppliedFailed,
		Message: "Not all manifests were applied before the Work was suspended: " + kube.Truncate(cmp.Or(message, "it was interrupted"), kube.MaxMessage),
	}
}

func removalFailedCondition(message string) metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonAppliedFailed,
		Message: "Failed to remove what was applied: " + message,
	}
}

func dispatchingCondition() metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkDispatching, Status: metav1.ConditionTrue, Reason: workv1alpha1.ReasonDispatching,
		Message: "Work is being dispatched to member clusters.",
	}
}

func suspendedCondition() metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkDispatching, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonSuspendDispatching,
		Message: "Work dispatching is in a suspended state.",
	}
}

// unreachableCondition returns the condition Applied of a Work whose cluster is unreachable. If the current generation
// was applied, the condition stays true.
func unreachableCondition(work *workv1alpha1.Work, message string) metav1.Condition {
	condition := notAppliedCondition(0, len(work.Spec.Workload.Manifests), message)
	before := meta.FindStatusCondition(work.Status.Conditions, workv1alpha1.WorkApplied)
	switch {
	case before == nil || before.Status == metav1.ConditionFalse:
	case before.Status == metav1.ConditionTrue && before.ObservedGeneration == work.Generation:
		return appliedCondition()
	default:
		// An earlier generation was applied.
		condition.Status = metav1.ConditionUnknown
	}
	return condition
}

// isUnresponsive returns true if err was caused by an unreachable cluster. A cluster that exceeded the limit but sent
// some responses is busy, not unreachable.
func isUnresponsive(err error) bool {
	if errors.Is(err, engine.ErrTimeUp) && !errors.Is(err, ErrUnresponsive) {
		return false
	}
	_, ok := errors.AsType[*url.Error](err)
	return ok || errors.Is(err, ErrUnresponsive)
}

// stableMessage returns the engine's message, or the text of err if message is empty. The same problem always gives the
// same text, so connection errors are replaced: they contain ports that differ each time.
func stableMessage(err error, message string) string {
	if isUnresponsive(err) {
		return ErrUnresponsive.Error()
	}
	if errors.Is(err, engine.ErrTimeUp) {
		return engine.ErrTimeUp.Error()
	}
	return kube.Truncate(cmp.Or(message, err.Error()), kube.MaxMessage)
}

// setCondition sets a condition of the current generation in status.
func (e *Executor) setCondition(status *workv1alpha1.WorkStatus, work *workv1alpha1.Work, condition metav1.Condition) {
	condition.ObservedGeneration = work.Generation
	condition.LastTransitionTime = metav1.NewTime(e.Clock.Now())
	meta.SetStatusCondition(&status.Conditions, condition)
}

// patchStatus writes newStatus to the hub if it differs. If work is not the newest version, the error wraps ErrStale.
func (e *Executor) patchStatus(ctx context.Context, work *workv1alpha1.Work, newStatus *workv1alpha1.WorkStatus) error {
	if sameStatus(&work.Status, newStatus) {
		return nil
	}
	changed := work.DeepCopy()
	changed.Status = *newStatus
	err := e.Hub.Status().Patch(ctx, changed, client.MergeFromWithOptions(work, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("patch the status: %w", asStale(err))
	}
	return nil
}

// sameStatus compares two statuses. Object statuses are equal if their decoded JSON is.
func sameStatus(a, b *workv1alpha1.WorkStatus) bool {
	if !equality.Semantic.DeepEqual(a.Conditions, b.Conditions) || len(a.ManifestStatuses) != len(b.ManifestStatuses) {
		return false
	}
	for i := range a.ManifestStatuses {
		x, y := a.ManifestStatuses[i], b.ManifestStatuses[i]
		if x.Identifier != y.Identifier || x.Health != y.Health || !sameJSON(x.Status, y.Status) {
			return false
		}
	}
	return true
}

func sameJSON(a, b *runtime.RawExtension) bool {
	if a == nil || b == nil {
		return a == b
	}
	var x, y map[string]any
	if utiljson.Unmarshal(a.Raw, &x) != nil || utiljson.Unmarshal(b.Raw, &y) != nil {
		return false
	}
	return reflect.DeepEqual(x, y)
}

// manifestStatuses returns the status of each manifest's object. omitted counts the object statuses beyond
// maxStatusBytes.
func manifestStatuses(work *workv1alpha1.Work, observations []engine.Observation) (statuses []workv1alpha1.ManifestStatus, omitted int) {
	byKey := make(map[kube.Ref]engine.Observation, len(observations))
	for _, observation := range observations {
		byKey[observation.Ref.Key()] = observation
	}
	size := 0
	for i, manifest := range work.Spec.Workload.Manifests {
		status := workv1alpha1.ManifestStatus{Health: workv1alpha1.ResourceUnknown}
		status.Identifier.Ordinal = i
		if obj, err := decodeManifest(manifest); err == nil {
			observation := findObservation(kube.RefOf(obj), byKey)
			status.Identifier = newIdentifier(i, observation)
			status.Health = workv1alpha1.ResourceHealth(observation.Health)
			switch {
			case len(observation.Status) == 0 || observation.Status[0] != '{':
				// A RawExtension can have only a JSON object.
			case size+len(observation.Status) > maxStatusBytes:
				omitted++
			default:
				size += len(observation.Status)
				status.Status = &runtime.RawExtension{Raw: observation.Status}
			}
		}
		statuses = append(statuses, status)
	}
	return statuses, omitted
}

// lastObservations returns the observations in the status of the Work, with unknown health.
func lastObservations(work *workv1alpha1.Work) []engine.Observation {
	var all []engine.Observation
	for _, status := range work.Status.ManifestStatuses {
		id := status.Identifier
		ref := kube.Ref{Group: id.Group, Version: id.Version, Kind: id.Kind, Namespace: id.Namespace, Name: id.Name}
		last := engine.Observation{Ref: ref, Resource: id.Resource, Health: engine.Unknown}
		if status.Status != nil {
			last.Status = status.Status.Raw
		}
		all = append(all, last)
	}
	return all
}

// findObservation returns the observation of a manifest's object, or one with health Unknown if there is none. The
// engine may have changed the namespace of the manifest: it sets the namespace default on an object of a namespaced
// kind without a namespace, and removes the namespace of an object of a cluster-scoped kind.
func findObservation(ref kube.Ref, byKey map[kube.Ref]engine.Observation) engine.Observation {
	namespaces := []string{ref.Namespace, ""}
	if ref.Namespace == "" {
		namespaces = []string{"", metav1.NamespaceDefault}
	}
	for _, namespace := range namespaces {
		key := ref.Key()
		key.Namespace = namespace
		if found, ok := byKey[key]; ok {
			return found
		}
	}
	resource, _ := meta.UnsafeGuessKindToResource(ref.GVK())
	return engine.Observation{Ref: ref, Resource: resource.Resource, Health: engine.Unknown}
}

func newIdentifier(ordinal int, observation engine.Observation) workv1alpha1.ResourceIdentifier {
	return workv1alpha1.ResourceIdentifier{
		Ordinal: ordinal, Group: observation.Ref.Group, Version: observation.Ref.Version, Kind: observation.Ref.Kind, Resource: observation.Resource,
		Namespace: observation.Ref.Namespace, Name: observation.Ref.Name,
	}
}
