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
	// labelRetainReplicas with the value "true" on an object of a bundle with RejectUnmanaged excludes its replicas: they
	// are applied only to a new object.
	labelRetainReplicas = "resourcetemplate.karmada.io/retain-replicas"
	// retainTries is the maximum number of attempts to apply an object that other clients change meanwhile.
	retainTries = 5
)

// hasRetainedReplicas returns whether the replicas of a target are excluded by labelRetainReplicas.
func (t *target) hasRetainedReplicas() bool {
	_, scales := mapOf(t.content["spec"])["replicas"]
	return scales && t.rejectUnmanaged && mapOf(mapOf(t.content["metadata"])["labels"])[labelRetainReplicas] == "true"
}

// sendRetaining applies a target to the object with this UID, and leaves its excluded fields alone. First it removes
// them from the fields that our manager owns. Then it calls send with a target that lacks them: so the API server does
// not change them. In a list or map that managers own only as a whole, that target has the existing values of the
// excluded fields. Then send must also send resourceVersion, so that it does not overwrite newer values; otherwise
// resourceVersion is "". sendRetaining calls send again after a conflict. It returns a conflict if the object was
// deleted or replaced.
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
		result, err := send(ctx, &retaining, version)
		if !apierrors.IsConflict(err) {
			return result, err
		}
	}
	return nil, errBusy
}

// disownFields removes fields of an existing object from the fields that our manager owns, and returns the new
// resourceVersion. It sends no request if the manager owns none of them.
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

// isAnyOwnApply is inventory.IsOwnApply, and also true for entries of subresources.
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

// excludeFields returns the content that sendRetaining applies. If we have applied the object with another API version,
// our fields are not known, and the content has the existing values of all excluded fields.
func excludeFields(content map[string]any, existing *unstructured.Unstructured, excluded []jsonPath) (retention, error) {
	root := fieldNode{fields: &fieldpath.Set{}}
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

// lastItemsFirst returns paths without duplicates, higher list indexes first: the deletion of an item then changes no
// index of a later path.
func lastItemsFirst(paths []jsonPath) []jsonPath {
	sorted := slices.Clone(paths)
	slices.SortFunc(sorted, func(a, b jsonPath) int { return slices.CompareFunc(b, a, compareSegments) })
	return slices.CompactFunc(sorted, slices.Equal)
}

// compareSegments compares list indexes as numbers, and other segments as text.
func compareSegments(a, b string) int {
	m, errA := strconv.Atoi(a)
	n, errB := strconv.Atoi(b)
	if errA == nil && errB == nil {
		return cmp.Compare(m, n)
	}
	return cmp.Compare(a, b)
}

// fieldNode is a map or a list in an object.
type fieldNode struct {
	path fieldpath.Path
	// fields are the fields or items in it that managers own. It is empty if managers own the node only as a whole, or if
	// they own nothing in it.
	fields *fieldpath.Set
}

// below returns the child node at an element.
func (at fieldNode) below(element fieldpath.PathElement) fieldNode {
	return fieldNode{path: at.pathOf(element), fields: at.fields.WithPrefix(element)}
}

func (at fieldNode) pathOf(element fieldpath.PathElement) fieldpath.Path {
	return append(at.path.Copy(), element)
}

// isKey returns whether the node is an item of a list, and the field is one of the keys that identify the item.
func (at fieldNode) isKey(field string) bool {
	if len(at.path) == 0 || at.path[len(at.path)-1].Key == nil {
		return false
	}
	return slices.ContainsFunc(*at.path[len(at.path)-1].Key, func(key value.Field) bool { return key.Name == field })
}

// retain returns a copy of desired that lacks the excluded field at path, or has its existing value. at is the node of
// desired.
func (r *retention) retain(desired, existing any, path jsonPath, at fieldNode) any {
	switch desired := desired.(type) {
	case map[string]any:
		return r.retainInMap(desired, mapOf(existing), path, at)
	case []any:
		items, _ := existing.([]any)
		return r.retainInList(desired, items, path, at)
	case nil:
		// Our manager may own the field since an earlier revision.
		if fields, ok := existing.(map[string]any); ok {
			return r.retainInMap(map[string]any{}, fields, path, at)
		}
	}
	return desired
}

// retainInMap is retain for a map.
func (r *retention) retainInMap(desired, existing map[string]any, path jsonPath, at fieldNode) map[string]any {
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
	} else if existingValue, exists := existing[key]; exists { // managers own the map only as a whole
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

// retainInList is retain for a list. The index in path is an index of desired. An item that does not exist is applied
// with all its fields, unless the whole item is excluded.
func (r *retention) retainInList(desired, existing []any, path jsonPath, at fieldNode) []any {
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
	default: // managers own the list only as a whole
		copied[index], r.hasExisting = item, true
	}
	return copied
}

// findItem returns the existing item of a list that is the same as a desired item, and its node. Equal items have the
// same keys, or in a set the same value. If managers own no items, it returns the item with the same index, and a node
// without a path.
func (at fieldNode) findItem(desired any, existing []any, index int) (item any, below fieldNode, exists bool) {
	sample, ok := at.anyItem()
	if !ok {
		if index < len(existing) {
			item, exists = existing[index], true
		}
		return item, fieldNode{fields: &fieldpath.Set{}}, exists
	}
	for _, item := range existing {
		element, ok := elementLike(sample, item)
		if ok && identifies(element, desired) {
			return item, at.below(element), true
		}
	}
	return nil, fieldNode{}, false
}

// anyItem returns the element of an item of a list. ok is false if managers own no items.
func (at fieldNode) anyItem() (sample fieldpath.PathElement, ok bool) {
	use := func(element fieldpath.PathElement) { sample, ok = element, true }
	at.fields.Children.Iterate(use)
	at.fields.Members.Iterate(use)
	return sample, ok
}

// elementLike returns the element of an existing item of a list: its value in a set, or the values of its keys. sample
// is the element of any item, and shows whether the list is a set or has keys.
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

// identifies returns whether an element has the keys or the value of a desired item. The item may lack keys for which
// the API server sets defaults.
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
