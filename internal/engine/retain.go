package engine

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
	"sigs.k8s.io/structured-merge-diff/v6/value"

	"github.com/towline/towline/internal/kube"
)

const (
	// labelRetainReplicas with the value "true" on an object of a bundle with RejectUnmanaged leaves the number of
	// replicas of an existing object to its cluster.
	labelRetainReplicas = "resourcetemplate.karmada.io/retain-replicas"
	// retainTries is the maximum number of attempts to apply an object that others change meanwhile.
	retainTries = 5
)

// retains returns whether the cluster decides about the replicas of a target.
func (t *target) retains() bool {
	_, scales := mapOf(t.content["spec"])["replicas"]
	return scales && t.rejectUnmanaged && mapOf(mapOf(t.content["metadata"])["labels"])[labelRetainReplicas] == "true"
}

// sendRetaining applies a target without its excluded fields to the object with this UID. send must send the request
// for the target that it gets. That target lacks the excluded fields, and our field manager does not own them, so the
// API server does not change them. A list or map that managers own only as a whole must be sent as a whole: there the
// target has the existing values of the excluded fields. So that they do not overwrite newer values, send must then
// also send the resourceVersion, which is "" otherwise. sendRetaining repeats send after a conflict. It returns a
// conflict if the object is deleted or replaced.
func (p *applyRun) sendRetaining(
	ctx context.Context, v decision, uid types.UID, send func(ctx context.Context, t *target, resourceVersion string) (*live, error),
) (*live, error) {
	for range retainTries {
		existing, err := p.engine.member.dynamicAt(v.resource, v.ref.Namespace).Get(ctx, v.ref.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && existing.GetUID() != uid {
			return nil, apierrors.NewConflict(v.resource.GVR.GroupResource(), v.ref.Name, errReplaced)
		}
		if err != nil {
			return nil, err
		}
		r, err := excludeFields(v.content, existing, v.excluded)
		if err != nil {
			return nil, err
		}
		version, err := p.disownFields(ctx, v, existing, r.excluded)
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !r.hasExisting {
			version = ""
		}
		retaining := *v.target
		retaining.content = r.content
		now, err := send(ctx, &retaining, version)
		if !apierrors.IsConflict(err) {
			return now, err
		}
	}
	return nil, errBusy
}

// disownFields removes fields of an existing object from those that our field manager owns. It returns the
// resourceVersion after that, and sends no request if the manager owns none of the fields.
func (p *applyRun) disownFields(ctx context.Context, v decision, existing *unstructured.Unstructured, disowned *fieldpath.Set) (string, error) {
	var managers []metav1.ManagedFieldsEntry
	changed := false
	for _, entry := range existing.GetManagedFields() {
		if isAnyOwnApply(entry) {
			fields, err := fieldsOf(entry)
			if err != nil {
				return "", err
			}
			if rest := fields.RecursiveDifference(disowned); !rest.Equals(fields) {
				changed = true
				if rest.Empty() {
					continue
				}
				if entry.FieldsV1, err = encodeFields(rest); err != nil {
					return "", err
				}
			}
		}
		managers = append(managers, entry)
	}
	if !changed {
		return existing.GetResourceVersion(), nil
	}
	return p.engine.member.replaceManagers(ctx, v.target, managers, existing.GetResourceVersion())
}

// isAnyOwnApply is inventory.IsOwnApply, but it is true for entries of subresources, too.
func isAnyOwnApply(entry metav1.ManagedFieldsEntry) bool {
	return entry.Manager == kube.FieldManager && entry.Operation == metav1.ManagedFieldsOperationApply && entry.FieldsV1 != nil
}

// retention is the content to apply to an existing object.
type retention struct {
	content map[string]any
	// excluded are the excluded fields that content lacks. Our field manager must not own them.
	excluded *fieldpath.Set
	// hasExisting is true if content has existing values of excluded fields.
	hasExisting bool
}

// excludeFields returns a copy of content with the excluded fields as sendRetaining describes. If we have applied the
// object with another API version, it is not known which fields are ours, and the copy has all existing values.
func excludeFields(content map[string]any, existing *unstructured.Unstructured, excluded []jsonPath) (retention, error) {
	root := place{fields: &fieldpath.Set{}}
	for _, entry := range existing.GetManagedFields() {
		if entry.APIVersion != existing.GetAPIVersion() {
			if isAnyOwnApply(entry) {
				root.fields = &fieldpath.Set{}
				break
			}
			continue
		}
		if entry.FieldsV1 == nil {
			continue
		}
		fields, err := fieldsOf(entry)
		if err != nil {
			return retention{}, err
		}
		root.fields = root.fields.Union(fields)
	}
	r := retention{content: content, excluded: &fieldpath.Set{}}
	for _, path := range lastItemsFirst(excluded) {
		r.content = r.retainInMap(r.content, existing.Object, path, root)
	}
	return r, nil
}

// lastItemsFirst returns paths without duplicates in an order in which the deletion of an item of a list changes no
// index of a later path.
func lastItemsFirst(paths []jsonPath) []jsonPath {
	sorted := slices.Clone(paths)
	slices.SortFunc(sorted, func(a, b jsonPath) int { return slices.CompareFunc(b, a, compareSegments) })
	return slices.CompactFunc(sorted, slices.Equal)
}

// compareSegments compares indexes as numbers.
func compareSegments(a, b string) int {
	m, errA := strconv.Atoi(a)
	n, errB := strconv.Atoi(b)
	if errA == nil && errB == nil {
		return cmp.Compare(m, n)
	}
	return cmp.Compare(a, b)
}

// place is a map or a list in an object.
type place struct {
	path fieldpath.Path
	// fields are the fields or items in it that managers own. It is empty if managers own the place only as a whole, or if
	// nobody owns anything in it.
	fields *fieldpath.Set
}

// below returns the place at an element.
func (at place) below(element fieldpath.PathElement) place {
	return place{path: at.pathOf(element), fields: at.fields.WithPrefix(element)}
}

func (at place) pathOf(element fieldpath.PathElement) fieldpath.Path {
	return append(at.path.Copy(), element)
}

// isKey returns whether the place is an item of a list that a field identifies.
func (at place) isKey(field string) bool {
	if len(at.path) == 0 || at.path[len(at.path)-1].Key == nil {
		return false
	}
	return slices.ContainsFunc(*at.path[len(at.path)-1].Key, func(key value.Field) bool { return key.Name == field })
}

// retain returns a copy of desired in which the field at path is excluded.
func (r *retention) retain(desired, existing any, path jsonPath, at place) any {
	switch desired := desired.(type) {
	case map[string]any:
		return r.retainInMap(desired, mapOf(existing), path, at)
	case []any:
		items, _ := existing.([]any)
		return r.retainInList(desired, items, path, at)
	case nil:
		// An earlier revision can have had the field.
		if fields, ok := existing.(map[string]any); ok {
			return r.retainInMap(map[string]any{}, fields, path, at)
		}
	}
	return desired
}

func (r *retention) retainInMap(desired, existing map[string]any, path jsonPath, at place) map[string]any {
	key := path[0]
	element := fieldpath.PathElement{FieldName: &key}
	copied := maps.Clone(desired)
	if len(path) > 1 {
		child := r.retain(desired[key], existing[key], path[1:], at.below(element))
		if !isEmpty(child) {
			copied[key] = child
		} else if !isEmpty(desired[key]) {
			delete(copied, key) // it had excluded fields only
		}
		return copied
	}
	if at.isKey(key) {
		return copied // the API server refuses an item without its key
	}
	delete(copied, key)
	if !at.fields.Empty() {
		r.excluded.Insert(at.pathOf(element))
	} else if existingValue, exists := existing[key]; exists {
		copied[key], r.hasExisting = existingValue, true
	}
	return copied
}

// isEmpty returns whether a value is nil, or a map or a list without content.
func isEmpty(value any) bool {
	switch value := value.(type) {
	case nil:
		return true
	case map[string]any:
		return len(value) == 0
	case []any:
		return len(value) == 0
	}
	return false
}

// retainInList is retain for a list. The index in path counts the items in desired. An item that does not exist is
// applied with all its fields.
func (r *retention) retainInList(desired, existing []any, path jsonPath, at place) []any {
	index, err := strconv.Atoi(path[0])
	if err != nil || index < 0 || index >= len(desired) {
		return desired
	}
	item, below, exists := at.findItem(desired[index], existing, index)
	copied := slices.Clone(desired)
	switch {
	case len(path) > 1 && exists:
		copied[index] = r.retain(desired[index], item, path[1:], below)
	case len(path) > 1:
	case !exists:
		return slices.Delete(copied, index, index+1)
	case len(below.path) > 0:
		r.excluded.Insert(below.path)
		return slices.Delete(copied, index, index+1)
	default:
		copied[index], r.hasExisting = item, true
	}
	return copied
}

// findItem returns the existing item of a list that has the keys, or in a set the value, of a desired item, and its
// place. If managers own no items, it returns the one with the same index, and a place without a path.
func (at place) findItem(desired any, existing []any, index int) (item any, below place, exists bool) {
	sample, ok := at.anyItem()
	if !ok {
		if index < len(existing) {
			item, exists = existing[index], true
		}
		return item, place{fields: &fieldpath.Set{}}, exists
	}
	for _, item := range existing {
		element, ok := elementLike(sample, item)
		if ok && identifies(element, desired) {
			return item, at.below(element), true
		}
	}
	return nil, place{}, false
}

// anyItem returns the element of any item of a list. It returns false if managers own no items.
func (at place) anyItem() (sample fieldpath.PathElement, ok bool) {
	use := func(element fieldpath.PathElement) { sample, ok = element, true }
	at.fields.Children.Iterate(use)
	at.fields.Members.Iterate(use)
	return sample, ok
}

// elementLike returns the element that identifies an existing item of a list: its value in a set, or the values of its
// keys. sample is the element of any item of the list, and shows which of them it is.
func elementLike(sample fieldpath.PathElement, item any) (fieldpath.PathElement, bool) {
	if sample.Value != nil {
		return fieldpath.ValueElement(value.NewValueInterface(item)), true
	}
	fields, ok := item.(map[string]any)
	if sample.Key == nil || !ok {
		return fieldpath.PathElement{}, false
	}
	var keys []value.Field
	for _, key := range *sample.Key {
		if held, ok := fields[key.Name]; ok {
			keys = append(keys, value.Field{Name: key.Name, Value: value.NewValueInterface(held)})
		}
	}
	return fieldpath.KeyElement(keys...), true
}

// identifies returns whether an element of a list has the keys or the value of a desired item. The item may lack keys,
// for which the API server sets defaults.
func identifies(element fieldpath.PathElement, desired any) bool {
	if element.Value != nil {
		return fmt.Sprint((*element.Value).Unstructured()) == fmt.Sprint(desired)
	}
	fields, ok := desired.(map[string]any)
	return ok && !slices.ContainsFunc(*element.Key, func(key value.Field) bool {
		held, ok := fields[key.Name]
		return ok && fmt.Sprint(held) != fmt.Sprint(key.Value.Unstructured())
	})
}
