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

	"github.com/towline/towline/internal/inventory"
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

// applyRetaining applies an existing object without a change of its excluded fields. The API server deletes a field, or
// sets its default, if only we have set it and the request lacks it. So the request has the existing values of those
// fields, and lacks the fields that others have set.
func (p *applyRun) applyRetaining(ctx context.Context, v decision, uid types.UID) (now *live, err error) {
	for range retainTries {
		whole, err := p.engine.member.dynamicClient.Resource(v.resource.GVR).Namespace(v.ref.Namespace).Get(ctx, v.ref.Name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, err
		}
		retaining, retained := *v.target, false
		if err == nil {
			if retaining.content, retained, err = retainFields(v.content, whole, v.excluded); err != nil {
				return nil, err
			}
		}
		body := retaining.body(v.adopt, uid)
		if retained {
			mapOf(body["metadata"])["resourceVersion"] = whole.GetResourceVersion()
		}
		raw, err := encode(v.ref, body)
		if err != nil {
			return nil, err
		}
		now, err = p.engine.member.apply(ctx, v.target, raw)
		if !retained || !apierrors.IsConflict(err) || whole.GetUID() != uid {
			return now, err
		}
	}
	return nil, errBusy
}

// retainFields returns a copy of content in which the excluded fields are as in the existing object if only we have
// set them, and missing otherwise. retained is true if it has any of the existing values. A field whose parent does not
// exist has the value in content.
func retainFields(content map[string]any, existing *unstructured.Unstructured, excluded []jsonPath) (copied map[string]any, retained bool, err error) {
	var r retainer
	ours, others := &fieldpath.Set{}, &fieldpath.Set{}
	for _, entry := range existing.GetManagedFields() {
		if entry.FieldsV1 == nil {
			continue
		}
		var fields fieldpath.Set
		if err := fields.FromJSON(entry.FieldsV1.GetRawReader()); err != nil {
			return nil, false, fmt.Errorf("decode the fields of manager %s: %w", entry.Manager, err)
		}
		if inventory.IsOwnApply(entry) {
			ours = &fields
			r.isOtherVersion = entry.APIVersion != existing.GetAPIVersion()
		} else {
			others = others.Union(&fields)
		}
	}
	all := ours.Union(others)
	var desired any = content
	for _, path := range lastItemsFirst(excluded) {
		desired = r.retain(desired, existing.Object, path, ownership{ours: ours.Difference(others), all: all})
	}
	return mapOf(desired), r.retained, nil
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

// retainer sets excluded fields.
type retainer struct {
	// retained is true if an existing value was set.
	retained bool
	// isOtherVersion is true if we have applied the object with another API version. Then it is not known which fields
	// are ours, and all existing values are retained.
	isOtherVersion bool
}

// ownership has the managed fields below a field.
type ownership struct {
	// ours has the fields that only Towline has set, and all has the fields of all managers.
	ours, all *fieldpath.Set
	// isAtomic is true if managers own the field only as a whole.
	isAtomic bool
}

// below returns the ownership below an element of a field, which has the given value.
func (o ownership) below(element fieldpath.PathElement, value any) ownership {
	next := ownership{ours: o.ours.WithPrefix(element), all: o.all.WithPrefix(element)}
	next.isAtomic = o.isAtomic || next.all.Empty() && !isLeaf(value)
	return next
}

// isLeaf returns whether a value has no fields or items.
func isLeaf(value any) bool {
	switch value := value.(type) {
	case map[string]any:
		return len(value) == 0
	case []any:
		return len(value) == 0
	}
	return true
}

// retain returns a copy of desired with the field at path as in existing. It returns desired if either has no parent of
// the field.
func (r *retainer) retain(desired, existing any, path jsonPath, owned ownership) any {
	switch desired := desired.(type) {
	case map[string]any:
		if existing, ok := existing.(map[string]any); ok {
			return r.retainInMap(desired, existing, path, owned)
		}
	case []any:
		if existing, ok := existing.([]any); ok {
			return r.retainInList(desired, existing, path, owned)
		}
	}
	return desired
}

func (r *retainer) retainInMap(desired, existing map[string]any, path jsonPath, owned ownership) any {
	key := path[0]
	value, exists := existing[key]
	element := fieldpath.PathElement{FieldName: &key}
	copied := maps.Clone(desired)
	if len(path) > 1 {
		if child, ok := desired[key]; ok && exists {
			copied[key] = r.retain(child, value, path[1:], owned.below(element, value))
		}
		return copied
	}
	delete(copied, key)
	if exists {
		if kept, ok := r.ownValue(value, element, owned); ok {
			copied[key], r.retained = kept, true
		}
	}
	return copied
}

// retainInList is retain for a list. The index in path counts the items in desired. The existing item is the one with
// the same keys, or the one with the same index if the list has no keys.
func (r *retainer) retainInList(desired, existing []any, path jsonPath, owned ownership) any {
	index, err := strconv.Atoi(path[0])
	if err != nil || index < 0 || index >= len(desired) {
		return desired
	}
	element, value, exists := findItem(desired[index], existing, owned)
	next := ownership{isAtomic: true, ours: &fieldpath.Set{}, all: &fieldpath.Set{}}
	if element.Key != nil {
		next = owned.below(element, value)
	} else if index < len(existing) {
		value, exists = existing[index], true
	}
	copied := slices.Clone(desired)
	switch {
	case len(path) > 1 && exists:
		copied[index] = r.retain(desired[index], value, path[1:], next)
	case len(path) > 1:
	case exists:
		kept, ok := value, true
		if element.Key != nil {
			kept, ok = r.ownValue(value, element, owned)
		}
		if !ok {
			return slices.Delete(copied, index, index+1)
		}
		copied[index], r.retained = kept, true
	}
	return copied
}

// ownValue returns the parts of an existing value that only we have set, false if there are none.
func (r *retainer) ownValue(value any, element fieldpath.PathElement, owned ownership) (any, bool) {
	if owned.isAtomic || r.isOtherVersion {
		return value, true
	}
	return extract(value, element, owned.ours)
}

// extract returns the parts of the value of an element that are in a set of fields.
func extract(value any, element fieldpath.PathElement, fields *fieldpath.Set) (any, bool) {
	below, hasBelow := fields.Children.Get(element)
	if !hasBelow {
		return value, fields.Members.Has(element) // a leaf, or an atomic map or list
	}
	switch value := value.(type) {
	case map[string]any:
		parts := map[string]any{}
		for key, child := range value {
			if part, ok := extract(child, fieldpath.PathElement{FieldName: &key}, below); ok {
				parts[key] = part
			}
		}
		if element.Key != nil {
			for _, field := range *element.Key {
				parts[field.Name] = value[field.Name]
			}
		}
		return parts, true
	case []any:
		parts := []any{}
		for _, item := range value {
			child, ok := elementOf(item, below)
			if !ok {
				continue
			}
			if part, ok := extract(item, child, below); ok {
				parts = append(parts, part)
			}
		}
		return parts, true
	}
	return value, true
}

// elementOf returns the element in a set of fields that identifies an item of a list.
func elementOf(item any, fields *fieldpath.Set) (fieldpath.PathElement, bool) {
	for _, elements := range []func(func(fieldpath.PathElement)){fields.Children.Iterate, fields.Members.Iterate} {
		var found *fieldpath.PathElement
		elements(func(element fieldpath.PathElement) {
			if found == nil && identifies(element, item, false) {
				found = &element
			}
		})
		if found != nil {
			return *found, true
		}
	}
	return fieldpath.PathElement{}, false
}

// findItem returns the existing item with the keys of a desired one. element has no Key if the list has no keys.
func findItem(desired any, existing []any, owned ownership) (element fieldpath.PathElement, item any, found bool) {
	for candidate := range owned.all.Children.All() {
		if candidate.Key == nil {
			continue
		}
		element = candidate
		if !identifies(candidate, desired, true) {
			continue
		}
		for _, item := range existing {
			if identifies(candidate, item, false) {
				return candidate, item, true
			}
		}
	}
	return element, nil, false
}

// identifies returns whether an element of a list has the keys or the value of an item. With canOmit, the item may lack
// keys, for which the API server sets defaults.
func identifies(element fieldpath.PathElement, item any, canOmit bool) bool {
	if element.Value != nil {
		return fmt.Sprint((*element.Value).Unstructured()) == fmt.Sprint(item)
	}
	fields, ok := item.(map[string]any)
	if element.Key == nil || !ok {
		return false
	}
	for _, key := range *element.Key {
		value, ok := fields[key.Name]
		if ok && fmt.Sprint(value) != fmt.Sprint(key.Value.Unstructured()) || !ok && !canOmit {
			return false
		}
	}
	return true
}
