package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// maxAdoptAttempts is the number of attempts to take over the fields of an object that other clients change meanwhile.
const maxAdoptAttempts = 5

// isPastManager returns whether a managedFields entry belongs to a tool that stops managing an adopted object: helm, or
// kubectl with any command, with client-side or server-side apply. Controllers, status writers and unknown tools
// continue to manage it.
func isPastManager(entry metav1.ManagedFieldsEntry) bool {
	if entry.Subresource != "" || entry.FieldsV1 == nil {
		return false
	}
	switch entry.Manager {
	case "helm", "before-first-apply":
		return true
	}
	return strings.HasPrefix(entry.Manager, "kubectl")
}

// adoptFields takes over the fields of an object that has no ownership labels and is not in the inventory.
func (p *applyRun) adoptFields(ctx context.Context, v decision) error {
	if v.existing == nil || v.existing.IsMarked() || p.prior.Entries[v.key()].UID == v.existing.UID {
		return nil
	}
	return p.takeOverFields(ctx, v, v.existing)
}

// createObject applies an object that does not exist, or adopts it if another client has created it meanwhile. created
// is true if this request created the object: then no other manager has set fields of it.
func (p *applyRun) createObject(ctx context.Context, v decision) (applied *live, created bool, err error) {
	applied, err = p.requestApply(ctx, v, "")
	switch {
	case apierrors.IsConflict(err):
		if v.rejectUnmanaged && !v.overwrite {
			return nil, false, errReplaced
		}
		obj, err := p.engine.member.metadataAt(v.resource, v.ref.Namespace).Get(ctx, v.ref.Name, metav1.GetOptions{})
		if err != nil {
			return nil, false, err
		}
		applied = liveOf(obj)
	case err != nil:
		return nil, false, err
	case !applied.hasOtherManager:
		return applied, true, nil
	}
	v.adopt = true
	if err := p.takeOverFields(ctx, v, applied); err != nil {
		return nil, false, err
	}
	applied, err = p.requestApply(ctx, v, applied.UID)
	return applied, false, err
}

// takeOverFields makes our field manager the owner of the fields that past managers have set on an adopted object, so
// that the next apply deletes the fields that the bundle lacks. It sends no request if no past manager has set fields.
func (p *applyRun) takeOverFields(ctx context.Context, v decision, existing *live) error {
	if !existing.hasPastManager {
		return nil
	}
	for range maxAdoptAttempts {
		obj, err := p.engine.member.metadataAt(v.resource, v.ref.Namespace).Get(ctx, v.ref.Name, metav1.GetOptions{})
		if err != nil || obj.UID != existing.UID {
			// The apply request that follows fails if the object was deleted or replaced.
			return ignoreNotFound("read its field managers", err)
		}
		merged, err := mergePastManagers(obj.ManagedFields, v.ref.GVK().GroupVersion().String())
		if err != nil || merged == nil {
			return err
		}
		_, err = p.engine.member.replaceManagers(ctx, v.target, merged, obj.ResourceVersion)
		if !apierrors.IsConflict(err) {
			return ignoreNotFound("take over its fields", err)
		}
	}
	return errBusy
}

// replaceManagers replaces the managed fields of an object, and returns its new resourceVersion. It returns a conflict
// if the object has another resourceVersion than version.
func (m *memberClient) replaceManagers(ctx context.Context, t *target, managers []metav1.ManagedFieldsEntry, version string) (string, error) {
	body, err := json.Marshal([]map[string]any{
		{"op": "replace", "path": "/metadata/managedFields", "value": managers},
		// Replacing the version makes the server refuse the request if the object has changed.
		{"op": "replace", "path": "/metadata/resourceVersion", "value": version},
	})
	if err != nil {
		return "", fmt.Errorf("encode patch: %w", err)
	}
	obj, err := m.metadataAt(t.resource, t.ref.Namespace).Patch(ctx, t.ref.Name, types.JSONPatchType, body, metav1.PatchOptions{FieldManager: kube.FieldManager})
	if err != nil {
		return "", err
	}
	return obj.ResourceVersion, nil
}

func ignoreNotFound(operation string, err error) error {
	if err == nil || apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("%s: %w", operation, err)
}

// mergePastManagers moves the fields of past managers to the entry of our last apply, and returns the new
// managedFields, or nil if there is nothing to move. All fields of an entry are of one API version, so it moves only
// the entries with the version of mergeVersion. desired is the API version of the object in the bundle.
func mergePastManagers(entries []metav1.ManagedFieldsEntry, desired string) ([]metav1.ManagedFieldsEntry, error) {
	version, found := mergeVersion(entries, desired)
	if !found {
		return nil, nil
	}
	ours := metav1.ManagedFieldsEntry{
		Manager: kube.FieldManager, Operation: metav1.ManagedFieldsOperationApply, APIVersion: version, FieldsType: "FieldsV1",
	}
	fields := &fieldpath.Set{}
	var rest []metav1.ManagedFieldsEntry
	merges := false
	for _, entry := range entries {
		past := isPastManager(entry) && entry.APIVersion == version
		if !past && !inventory.IsOwnApply(entry) {
			rest = append(rest, entry)
			continue
		}
		merges = merges || past
		set, err := fieldsOf(entry)
		if err != nil {
			return nil, err
		}
		fields = fields.Union(set)
		if entryTime(entry).After(entryTime(ours)) {
			ours.Time = entry.Time
		}
	}
	if !merges {
		return nil, nil
	}
	var err error
	if ours.FieldsV1, err = encodeFields(fields); err != nil {
		return nil, err
	}
	return append(rest, ours), nil
}

// maxManagedFields is the maximum size of the fields of one manager, in bytes, that are decoded. API servers store
// objects of at most 1.5 MiB.
const maxManagedFields = 1 << 20

// fieldsOf returns the fields of an entry of managed fields.
func fieldsOf(entry metav1.ManagedFieldsEntry) (*fieldpath.Set, error) {
	if len(entry.FieldsV1.GetRawBytes()) > maxManagedFields {
		return nil, fmt.Errorf("the fields of manager %s have more than %d MiB", entry.Manager, maxManagedFields>>20)
	}
	fields := &fieldpath.Set{}
	if err := fields.FromJSON(entry.FieldsV1.GetRawReader()); err != nil {
		return nil, fmt.Errorf("decode the fields of manager %s: %w", entry.Manager, err)
	}
	return fields, nil
}

// encodeFields encodes fields for an entry of managed fields.
func encodeFields(fields *fieldpath.Set) (*metav1.FieldsV1, error) {
	raw, err := fields.ToJSON()
	if err != nil {
		return nil, fmt.Errorf("encode managed fields: %w", err)
	}
	encoded := &metav1.FieldsV1{}
	encoded.SetRawBytes(raw)
	return encoded, nil
}

// mergeVersion returns the API version of the entries to merge. It is the version of our last apply. Without one, it is
// desired if a past manager has that version, else the version of the past manager that wrote last. found is false
// without any such entry.
func mergeVersion(entries []metav1.ManagedFieldsEntry, desired string) (version string, found bool) {
	var newest metav1.ManagedFieldsEntry
	for _, entry := range entries {
		if inventory.IsOwnApply(entry) {
			return entry.APIVersion, true
		}
		if !isPastManager(entry) || (found && version == desired) {
			continue
		}
		if !found || entry.APIVersion == desired || entryTime(entry).After(entryTime(newest)) {
			version, found, newest = entry.APIVersion, true, entry
		}
	}
	return version, found
}

func entryTime(entry metav1.ManagedFieldsEntry) time.Time {
	if entry.Time == nil {
		return time.Time{}
	}
	return entry.Time.Time
}
