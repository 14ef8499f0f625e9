// Package rollback writes the objects of one registration to a cluster, and rolls the writes back if the registration
// fails.
//
// A registration writes to two clusters, the hub and the member, and uses one Log for each. A Log adds the annotation
// AttemptAnnotation with the uid of the run to each object that it writes. RollBack changes only objects that still
// have it: an object that another run has written since belongs to that run. The Log adds each undo function before it
// sends the request, since a request whose response is lost may have been executed.
//
// A process that is killed rolls nothing back. Each registration therefore can be repeated: Apply makes the objects
// that are missing, and changes those that the function check accepts.
package rollback

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// AttemptAnnotation on an object is the uid of the run of a registration that wrote it last.
const AttemptAnnotation = "towline.dev/registration-attempt"

// rollBackTimeout limits RollBack, which sends about fifteen requests. Functions that callers pass to Add may also wait
// for the pods of an agent.
const rollBackTimeout = 40 * time.Second

// ErrBeingDeleted is returned for an object that exists and is being deleted.
var ErrBeingDeleted = errors.New("it is being deleted there; try again when it is gone")

// Result is the effect of Apply on an object, in the words of kubectl apply.
type Result string

// The results of Apply.
const (
	Created    Result = "created"
	Configured Result = "configured"
	Unchanged  Result = "unchanged"
)

// Log writes objects to one cluster and has the functions that undo the writes. It is not safe for concurrent use.
type Log struct {
	client  client.Client
	attempt string
	undo    []func(context.Context) error
}

// New returns a Log of the run with the uid attempt. With an empty attempt the Log has nothing to roll back, and Apply
// sends no request for an object that has the desired content.
func New(c client.Client, attempt string) *Log { return &Log{client: c, attempt: attempt} }

// Attempt returns the uid of the run.
func (l *Log) Attempt() string { return l.attempt }

// IsLastWriter returns whether this run is the last one that wrote the object.
func (l *Log) IsLastWriter(live client.Object) bool {
	return l.attempt != "" && live.GetAnnotations()[AttemptAnnotation] == l.attempt
}

// Add adds a function for RollBack to call.
func (l *Log) Add(undo func(context.Context) error) {
	if l.attempt != "" {
		l.undo = append(l.undo, undo)
	}
}

// RollBack calls the functions that undo the writes, newest first, and returns their errors. It has a time limit of its
// own, and also works after ctx was cancelled.
func (l *Log) RollBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollBackTimeout)
	defer cancel()
	var errs []error
	for _, undo := range slices.Backward(l.undo) {
		errs = append(errs, undo(ctx))
	}
	l.undo = nil
	return errors.Join(errs...)
}

// Apply creates obj, or applies it to the existing object if check returns nil for that; a nil check accepts any
// object. It returns the object after the write. RollBack deletes a created object, and restores the changed fields of
// an existing one; fields that only other clients have changed are kept.
func (l *Log) Apply(ctx context.Context, obj client.Object, check func(live *unstructured.Unstructured) error) (live *unstructured.Unstructured, result Result, err error) {
	desired, err := kube.ToUnstructured(l.client.Scheme(), obj)
	if err != nil {
		return nil, "", err
	}
	isStale := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
	err = kube.RetryOn(ctx, isStale, func() error {
		existing, err := l.read(ctx, desired)
		switch {
		case err != nil:
			return err
		case existing == nil:
			live, err = l.create(ctx, desired)
			result = Created
			return err
		case check != nil:
			if err := check(existing); err != nil {
				return err
			}
		}
		live, result, err = l.change(ctx, existing, desired)
		return err
	})
	if err != nil {
		return nil, "", err
	}
	return live, result, nil
}

// Create is Apply for an object that probably does not exist: it reads the object only if it exists.
func (l *Log) Create(ctx context.Context, obj client.Object, check func(live *unstructured.Unstructured) error) (live *unstructured.Unstructured, result Result, err error) {
	desired, err := kube.ToUnstructured(l.client.Scheme(), obj)
	if err != nil {
		return nil, "", err
	}
	live, err = l.create(ctx, desired)
	if apierrors.IsAlreadyExists(err) {
		return l.Apply(ctx, obj, check)
	}
	return live, Created, err
}

func (l *Log) create(ctx context.Context, desired *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	created := withAttempt(desired, l.attempt)
	l.Add(func(ctx context.Context) error { return l.deleteCreated(ctx, created) })
	if err := l.client.Create(ctx, created, client.FieldOwner(kube.FieldManager)); err != nil {
		return nil, fmt.Errorf("write %s: %w", kube.RefOf(desired), err)
	}
	return created.DeepCopy(), nil
}

func (l *Log) change(ctx context.Context, existing, desired *unstructured.Unstructured) (*unstructured.Unstructured, Result, error) {
	if existing.GetDeletionTimestamp() != nil {
		return nil, "", fmt.Errorf("write %s: %w", kube.RefOf(desired), ErrBeingDeleted)
	}
	applied := withAttempt(desired, cmp.Or(l.attempt, existing.GetAnnotations()[AttemptAnnotation]))
	if l.attempt == "" && contains(existing.Object, applied.Object) {
		return existing, Unchanged, nil
	}
	// An object that is deleted meanwhile must not be created by this request: RollBack would not delete it.
	applied.SetUID(existing.GetUID())
	isApplied := false
	l.Add(func(ctx context.Context) error {
		return l.undoIfLastWriter(ctx, existing, func(live *unstructured.Unstructured) error {
			if live.GetUID() != existing.GetUID() {
				return nil
			}
			// If the response was lost, the written content is not known: every field that differs is restored.
			written := live
			if isApplied {
				written = applied
			}
			before := content(existing)
			before.SetResourceVersion(live.GetResourceVersion()) // a write since this read is a conflict
			patch, err := client.MergeFrom(content(written)).Data(before)
			if err != nil {
				return err
			}
			return l.client.Patch(ctx, live, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(kube.FieldManager))
		})
	})
	if err := l.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(applied), client.FieldOwner(kube.FieldManager), client.ForceOwnership); err != nil {
		return nil, "", fmt.Errorf("write %s: %w", kube.RefOf(desired), err)
	}
	isApplied = true
	if equality.Semantic.DeepEqual(content(existing), content(withAttempt(applied, existing.GetAnnotations()[AttemptAnnotation]))) {
		return applied.DeepCopy(), Unchanged, nil
	}
	return applied.DeepCopy(), Configured, nil
}

// deleteCreated deletes an object that this run created. If the response was lost, created has no uid, and the attempt
// alone identifies the object.
func (l *Log) deleteCreated(ctx context.Context, created *unstructured.Unstructured) error {
	return l.undoIfLastWriter(ctx, created, func(live *unstructured.Unstructured) error {
		uid, version := live.GetUID(), live.GetResourceVersion()
		if created.GetUID() != "" && created.GetUID() != uid {
			return nil
		}
		return l.client.Delete(ctx, live, client.Preconditions{UID: &uid, ResourceVersion: &version}, client.PropagationPolicy("Background"))
	})
}

// undoIfLastWriter reads the object and calls undo with it if this run is the last one that wrote it.
func (l *Log) undoIfLastWriter(ctx context.Context, obj *unstructured.Unstructured, undo func(live *unstructured.Unstructured) error) error {
	err := kube.RetryOnConflict(ctx, func() error {
		live, err := l.read(ctx, obj)
		if err != nil || live == nil || !l.IsLastWriter(live) {
			return err
		}
		return client.IgnoreNotFound(undo(live))
	})
	if err != nil {
		return fmt.Errorf("roll back %s: %w", kube.RefOf(obj), err)
	}
	return nil
}

// read returns the object as it is on the cluster, or nil if it does not exist.
func (l *Log) read(ctx context.Context, obj *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	// The first call of a client does API discovery, which ignores ctx.
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(obj.GroupVersionKind())
	if err := l.client.Get(ctx, client.ObjectKeyFromObject(obj), live); err != nil {
		if apierrors.IsNotFound(err) {
			return nil, nil //nolint:nilnil // nil is the documented result for a missing object
		}
		return nil, fmt.Errorf("read %s: %w", kube.RefOf(obj), err)
	}
	return live, nil
}

// withAttempt returns a copy of obj with the annotation of an attempt, or without one if attempt is empty.
func withAttempt(obj *unstructured.Unstructured, attempt string) *unstructured.Unstructured {
	obj = obj.DeepCopy()
	annotations := obj.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[AttemptAnnotation] = attempt
	if attempt == "" {
		delete(annotations, AttemptAnnotation)
	}
	obj.SetAnnotations(annotations)
	return obj
}

// content returns a copy of obj with the fields that clients write.
func content(obj *unstructured.Unstructured) *unstructured.Unstructured {
	obj = obj.DeepCopy()
	delete(obj.Object, "status")
	for _, field := range []string{"creationTimestamp", "generation", "managedFields", "resourceVersion", "uid"} {
		unstructured.RemoveNestedField(obj.Object, "metadata", field)
	}
	if len(obj.GetAnnotations()) == 0 {
		unstructured.RemoveNestedField(obj.Object, "metadata", "annotations")
	}
	return obj
}

// IsUnchanged returns whether existing has all fields of desired, so that Apply of a Log without an attempt would write
// nothing. If desired has metadata only, existing needs no more.
func IsUnchanged(scheme *runtime.Scheme, existing, desired client.Object) bool {
	live, err := kube.ToUnstructured(scheme, existing)
	if err != nil || live.GetDeletionTimestamp() != nil {
		return false
	}
	wanted, err := kube.ToUnstructured(scheme, desired)
	return err == nil && contains(live.Object, wanted.Object)
}

// contains returns whether live has each field of desired. A desired null means that the field is not set by the
// caller. Lists are compared as a whole, except owner references: live may have more.
func contains(live, desired any) bool {
	switch desired := desired.(type) {
	case nil:
		return true
	case map[string]any:
		live, _ := live.(map[string]any)
		for key, value := range desired {
			compare := contains
			if key == "ownerReferences" {
				compare = containsEach
			}
			if !compare(live[key], value) {
				return false
			}
		}
		return true
	case []any:
		live, _ := live.([]any)
		return slices.EqualFunc(live, desired, contains)
	}
	return reflect.DeepEqual(live, desired)
}

// containsEach returns whether each element of the list desired is in the list live.
func containsEach(live, desired any) bool {
	existing, _ := live.([]any)
	wanted, _ := desired.([]any)
	return !slices.ContainsFunc(wanted, func(element any) bool {
		return !slices.ContainsFunc(existing, func(other any) bool { return contains(other, element) })
	})
}
