package works

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"reflect"
	"strings"

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

// maxMessage is how many bytes of a reason a condition holds; the API server takes 32768 characters.
const maxMessage = 8 << 10

// maxStatuses is how many bytes the statuses of a Work's objects may have together, so that the Work stays far below what the API server
// stores (1.5 MB). What does not fit is left out, and counted in the condition Applied; the health is always there.
const maxStatuses = 256 << 10

func applied() metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionTrue, Reason: workv1alpha1.ReasonAppliedSuccessful,
		Message: "Manifest has been successfully applied",
	}
}

func notApplied(done, all int, why string) metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonAppliedFailed,
		Message: fmt.Sprintf("Failed to apply all manifests (%d/%d): %s", done, all, why),
	}
}

func notAppliedYet() metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonSuspendDispatching,
		Message: "The manifests as they are now were not applied before the Work was suspended",
	}
}

// cutOff is about manifests that were tried and are not to be tried again while the Work is suspended.
func cutOff(why string) metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonAppliedFailed,
		Message: "Not all manifests were applied before the Work was suspended: " + short(cmp.Or(why, "it was interrupted")),
	}
}

func notRemoved(why string) metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkApplied, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonAppliedFailed,
		Message: "Failed to remove what was applied: " + why,
	}
}

func dispatching() metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkDispatching, Status: metav1.ConditionTrue, Reason: workv1alpha1.ReasonDispatching,
		Message: "Work is being dispatched to member clusters.",
	}
}

func suspended() metav1.Condition {
	return metav1.Condition{
		Type: workv1alpha1.WorkDispatching, Status: metav1.ConditionFalse, Reason: workv1alpha1.ReasonSuspendDispatching,
		Message: "Work dispatching is in a suspended state.",
	}
}

// unreached is about a Work whose cluster is not reached: what was applied stays applied, as far as anybody knows.
func unreached(work *workv1alpha1.Work, why string) metav1.Condition {
	verdict := notApplied(0, len(work.Spec.Workload.Manifests), why)
	before := meta.FindStatusCondition(work.Status.Conditions, workv1alpha1.WorkApplied)
	switch {
	case before == nil || before.Status == metav1.ConditionFalse:
	case before.Status == metav1.ConditionTrue && before.ObservedGeneration == work.Generation:
		return applied()
	default:
		// An earlier generation was applied.
		verdict.Status = metav1.ConditionUnknown
	}
	return verdict
}

// unanswered says whether err comes from a cluster that is not reached. One that is busy is reached, though its last requests were given up.
func unanswered(err error) bool {
	if errors.Is(err, engine.ErrTimeUp) && !errors.Is(err, ErrSilent) {
		return false
	}
	_, ok := errors.AsType[*url.Error](err)
	return ok || errors.Is(err, ErrSilent)
}

// steady returns a text for err, or what the engine says instead: the same for the same problem. Errors of connections name ports that
// differ each time.
func steady(err error, message string) string {
	if unanswered(err) {
		return ErrSilent.Error()
	}
	if errors.Is(err, engine.ErrTimeUp) {
		return engine.ErrTimeUp.Error()
	}
	return short(cmp.Or(message, err.Error()))
}

// short cuts a text that is longer than a condition should hold.
func short(text string) string {
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage], "") + "..."
	}
	return text
}

// set puts a condition into a status.
func (e *Executor) set(status *workv1alpha1.WorkStatus, work *workv1alpha1.Work, condition metav1.Condition) {
	condition.ObservedGeneration = work.Generation
	condition.LastTransitionTime = metav1.NewTime(e.Clock.Now())
	meta.SetStatusCondition(&status.Conditions, condition)
}

// report writes next as the status of work, if it says anything else. The error satisfies ErrStale if work is not the newest.
func (e *Executor) report(ctx context.Context, work *workv1alpha1.Work, next *workv1alpha1.WorkStatus) error {
	if sameStatus(&work.Status, next) {
		return nil
	}
	changed := work.DeepCopy()
	changed.Status = *next
	err := e.Hub.Status().Patch(ctx, changed, client.MergeFromWithOptions(work, client.MergeFromWithOptimisticLock{}))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("write the status: %w", stale(err))
	}
	return nil
}

// sameStatus compares two statuses, whatever the JSON of the objects' own looks like.
func sameStatus(a, b *workv1alpha1.WorkStatus) bool {
	if !equality.Semantic.DeepEqual(a.Conditions, b.Conditions) || len(a.ManifestStatuses) != len(b.ManifestStatuses) {
		return false
	}
	for i := range a.ManifestStatuses {
		one, other := a.ManifestStatuses[i], b.ManifestStatuses[i]
		if one.Identifier != other.Identifier || one.Health != other.Health || !sameJSON(one.Status, other.Status) {
			return false
		}
	}
	return true
}

func sameJSON(a, b *runtime.RawExtension) bool {
	if a == nil || b == nil {
		return a == b
	}
	var one, other map[string]any
	if utiljson.Unmarshal(a.Raw, &one) != nil || utiljson.Unmarshal(b.Raw, &other) != nil {
		return false
	}
	return reflect.DeepEqual(one, other)
}

// manifestStatuses says of each manifest how its object is. omitted is how many statuses are left out because all would be too big together.
func manifestStatuses(work *workv1alpha1.Work, seen []engine.Observation) (statuses []workv1alpha1.ManifestStatus, omitted int) {
	byKey := make(map[kube.Ref]engine.Observation, len(seen))
	for _, one := range seen {
		byKey[one.Ref.Key()] = one
	}
	size := 0
	for i, manifest := range work.Spec.Workload.Manifests {
		status := workv1alpha1.ManifestStatus{Health: workv1alpha1.ResourceUnknown}
		status.Identifier.Ordinal = i
		if obj, err := read(manifest); err == nil {
			one := observed(kube.RefOf(obj), byKey)
			status.Identifier = identifier(i, one)
			status.Health = workv1alpha1.ResourceHealth(one.Health)
			switch {
			case len(one.Status) == 0 || one.Status[0] != '{':
				// A status that is no object cannot be stored.
			case size+len(one.Status) > maxStatuses:
				omitted++
			default:
				size += len(one.Status)
				status.Status = &runtime.RawExtension{Raw: one.Status}
			}
		}
		statuses = append(statuses, status)
	}
	return statuses, omitted
}

// unseen returns the objects of a Work as they were reported last, with nothing known of how they are now.
func unseen(work *workv1alpha1.Work) []engine.Observation {
	var all []engine.Observation
	for _, status := range work.Status.ManifestStatuses {
		id := status.Identifier
		ref := kube.Ref{Group: id.Group, Version: id.Version, Kind: id.Kind, Namespace: id.Namespace, Name: id.Name}
		all = append(all, engine.Observation{Ref: ref, Resource: id.Resource, Health: engine.Unknown})
	}
	return all
}

// observed finds what was seen of the object of a manifest. The engine has put it into the namespace that its kind wants.
func observed(ref kube.Ref, byKey map[kube.Ref]engine.Observation) engine.Observation {
	for _, namespace := range []string{ref.Namespace, metav1.NamespaceDefault, ""} {
		placed := ref.Key()
		placed.Namespace = namespace
		if one, ok := byKey[placed]; ok && (namespace == ref.Namespace || ref.Namespace == "" || namespace == "") {
			return one
		}
	}
	resource, _ := meta.UnsafeGuessKindToResource(ref.GVK())
	return engine.Observation{Ref: ref, Resource: resource.Resource, Health: engine.Unknown}
}

func identifier(ordinal int, one engine.Observation) workv1alpha1.ResourceIdentifier {
	return workv1alpha1.ResourceIdentifier{
		Ordinal: ordinal, Group: one.Ref.Group, Version: one.Ref.Version, Kind: one.Ref.Kind, Resource: one.Resource,
		Namespace: one.Ref.Namespace, Name: one.Ref.Name,
	}
}
