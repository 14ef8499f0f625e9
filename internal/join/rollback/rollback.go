// Package rollback writes the objects of one registration to a cluster, and rolls the writes back if the registration
// fails.
//
// A registration writes to two clusters, the hub and the member, with one Writer for each. Packages join, karmada and
// register call New, then Apply for each object, and RollBack after a failure. A Writer without an attempt has no
// rollback: it is for repeated writes, such as the writes of a reconciler.
//
// Each run of a registration is an attempt with a uid. Apply writes the uid to the annotation AttemptAnnotation of the
// object. RollBack changes only objects that still have this uid: an object that another run has written since belongs
// to that run. The Writer adds each undo function before it sends the request, since a request whose response is lost
// may have been executed.
//
// A process that is killed rolls nothing back. Therefore a registration can be repeated: Apply creates missing objects,
// and changes existing ones that the function check accepts.
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

// AttemptAnnotation on an object is the uid of the attempt that wrote it last.
const AttemptAnnotation = "towline.dev/registration-attempt"

// rollBackTimeout limits RollBack: about fifteen requests, and the undo functions of callers, which may wait for the
// end of a deletion.
const rollBackTimeout = 40 * time.Second

// ErrBeingDeleted is returned for an object that is being deleted.
var ErrBeingDeleted = errors.New("it is being deleted there; try again when it is gone")

// Result is the effect of Apply on an object, as kubectl apply prints it.
type Result string

// The results of Apply.
const (
	Created    Result = "created"
	Configured Result = "configured"
	Unchanged  Result = "unchanged"
)

// Writer writes objects to one cluster, and has the undo functions for the writes. It is not safe for concurrent use.
type Writer struct {
	client  client.Client
	attempt string
	undo    []func(context.Context) error
}

// New returns a Writer. With an empty attempt, the Writer has nothing to roll back, and Apply sends no write for an
// object that has all desired fields.
func New(c client.Client, attempt string) *Writer { return &Writer{client: c, attempt: attempt} }

// Attempt returns the attempt, or "".
func (w *Writer) Attempt() string { return w.attempt }

// IsLastWriter returns whether this attempt wrote the object last.
func (w *Writer) IsLastWriter(live client.Object) bool {
	return w.attempt != "" && live.GetAnnotations()[AttemptAnnotation] == w.attempt
}

// AddUndo adds a function that RollBack calls. Without an attempt, it does nothing.
func (w *Writer) AddUndo(undo func(context.Context) error) {
	if w.attempt != "" {
		w.undo = append(w.undo, undo)
	}
}

// RollBack calls the undo functions, the last one first, and returns their errors. It ignores the end of ctx, and has a
// time limit of its own.
func (w *Writer) RollBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollBackTimeout)
	defer cancel()
	var errs []error
	for _, undo := range slices.Backward(w.undo) {
		errs = append(errs, undo(ctx))
	}
	w.undo = nil
	return errors.Join(errs...)
}

// Apply creates obj, or applies it to the existing object if check returns nil for that object. A nil check accepts
// every object. It returns the object after the write. RollBack deletes an object that Apply created. Of an existing
// object it restores the fields that Apply changed.
func (w *Writer) Apply(ctx context.Context, obj client.Object, check func(live *unstructured.Unstructured) error) (live *unstructured.Unstructured, result Result, err error) {
	desired, err := kube.ToUnstructured(w.client.Scheme(), obj)
	if err != nil {
		return nil, "", err
	}
	isStale := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
	err = kube.RetryOn(ctx, isStale, func() error {
		existing, err := w.read(ctx, desired)
		switch {
		case err != nil:
			return err
		case existing == nil:
			live, err = w.create(ctx, desired)
			result = Created
			return err
		case check != nil:
			if err := check(existing); err != nil {
				return err
			}
		}
		live, result, err = w.change(ctx, existing, desired)
		return err
	})
	if err != nil {
		return nil, "", err
	}
	return live, result, nil
}

// Create is Apply for an object that probably does not exist: it reads the object only if its creation fails with
// AlreadyExists.
func (w *Writer) Create(ctx context.Context, obj client.Object, check func(live *unstructured.Unstructured) error) (live *unstructured.Unstructured, result Result, err error) {
	desired, err := kube.ToUnstructured(w.client.Scheme(), obj)
	if err != nil {
		return nil, "", err
	}
	live, err = w.create(ctx, desired)
	if apierrors.IsAlreadyExists(err) {
		return w.Apply(ctx, obj, check)
	}
	return live, Created, err
}

func (w *Writer) create(ctx context.Context, desired *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	created := withAttempt(desired, w.attempt)
	w.AddUndo(func(ctx context.Context) error { return w.deleteCreated(ctx, created) })
	if err := w.client.Create(ctx, created, client.FieldOwner(kube.FieldManager)); err != nil {
		return nil, fmt.Errorf("write %s: %w", kube.RefOf(desired), err)
	}
	return created.DeepCopy(), nil
}

// change applies desired to existing.
func (w *Writer) change(ctx context.Context, existing, desired *unstructured.Unstructured) (*unstructured.Unstructured, Result, error) {
	if existing.GetDeletionTimestamp() != nil {
		return nil, "", fmt.Errorf("write %s: %w", kube.RefOf(desired), ErrBeingDeleted)
	}
	applied := withAttempt(desired, cmp.Or(w.attempt, existing.GetAnnotations()[AttemptAnnotation]))
	if w.attempt == "" && contains(existing.Object, applied.Object) {
		return existing, Unchanged, nil
	}
	// With the uid, this request does not create an object that was deleted since the read: RollBack would not delete it.
	applied.SetUID(existing.GetUID())
	isApplied := false
	w.AddUndo(func(ctx context.Context) error {
		return w.undoIfLastWriter(ctx, existing, func(live *unstructured.Unstructured) error {
			if live.GetUID() != existing.GetUID() {
				return nil
			}
			// If the response was lost, the written content is unknown. Restore every field that differs.
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
			return w.client.Patch(ctx, live, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(kube.FieldManager))
		})
	})
	if err := w.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(applied), client.FieldOwner(kube.FieldManager), client.ForceOwnership); err != nil {
		return nil, "", fmt.Errorf("write %s: %w", kube.RefOf(desired), err)
	}
	isApplied = true
	if equality.Semantic.DeepEqual(content(existing), content(withAttempt(applied, existing.GetAnnotations()[AttemptAnnotation]))) {
		return applied.DeepCopy(), Unchanged, nil
	}
	return applied.DeepCopy(), Configured, nil
}

// deleteCreated deletes an object that this attempt created. If the response of the creation was lost, created has no
// uid.
func (w *Writer) deleteCreated(ctx context.Context, created *unstructured.Unstructured) error {
	return w.undoIfLastWriter(ctx, created, func(live *unstructured.Unstructured) error {
		uid, version := live.GetUID(), live.GetResourceVersion()
		if created.GetUID() != "" && created.GetUID() != uid {
			return nil
		}
		return w.client.Delete(ctx, live, client.Preconditions{UID: &uid, ResourceVersion: &version}, client.PropagationPolicy("Background"))
	})
}

// undoIfLastWriter reads the object, and calls undo with it if this attempt wrote it last.
func (w *Writer) undoIfLastWriter(ctx context.Context, obj *unstructured.Unstructured, undo func(live *unstructured.Unstructured) error) error {
	err := kube.RetryOnConflict(ctx, func() error {
		live, err := w.read(ctx, obj)
		if err != nil || live == nil || !w.IsLastWriter(live) {
			return err
		}
		return client.IgnoreNotFound(undo(live))
	})
	if err != nil {
		return fmt.Errorf("roll back %s: %w", kube.RefOf(obj), err)
	}
	return nil
}

// read returns the existing object, or nil if it does not exist.
func (w *Writer) read(ctx context.Context, obj *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	// API discovery, the first request of a client, ignores ctx.
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(obj.GroupVersionKind())
	if err := w.client.Get(ctx, client.ObjectKeyFromObject(obj), live); err != nil {
		if apierrors.IsNotFound(err) {
			return nil, nil //nolint:nilnil // nil is the documented result for a missing object
		}
		return nil, fmt.Errorf("read %s: %w", kube.RefOf(obj), err)
	}
	return live, nil
}

// withAttempt returns a copy of obj with the annotation, or without it if attempt is empty.
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

// content returns a copy of obj without the fields that the API server sets.
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

// IsUnchanged returns whether existing has all fields of desired: Apply of a Writer without an attempt would then not
// write. If desired has only metadata, existing may be a PartialObjectMetadata.
func IsUnchanged(scheme *runtime.Scheme, existing, desired client.Object) bool {
	live, err := kube.ToUnstructured(scheme, existing)
	if err != nil || live.GetDeletionTimestamp() != nil {
		return false
	}
	wanted, err := kube.ToUnstructured(scheme, desired)
	return err == nil && contains(live.Object, wanted.Object)
}

// contains returns whether live has each field of desired with the same value. A null in desired is not compared. Lists
// must be equal, except ownerReferences: live may have more.
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
