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

// maxAdoptAttempts is the number of attempts to take over the fields of an object that others change meanwhile.
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

// adoptCreated takes over the fields of an object that another client created between our read and our apply, and
// applies it again.
func (p *applyRun) adoptCreated(ctx context.Context, v decision, now *live) (*live, error) {
	v.adopt = true
	if err := p.takeOverFields(ctx, v, now); err != nil {
		return nil, err
	}
	return p.requestApply(ctx, v, now.UID)
}

// takeOverFields makes our field manager the owner of the fields that past managers have set on an adopted object, so
// that the next apply deletes the fields that the bundle lacks. It sends no request if no past manager has set fields.
func (p *applyRun) takeOverFields(ctx context.Context, v decision, existing *live) error {
	api := p.engine.member.at(v.resource, v.ref.Namespace)
	entries, version := existing.managers, existing.Version
	for range maxAdoptAttempts {
		merged, err := mergePastManagers(entries, v.ref.GVK().GroupVersion().String())
		if err != nil || merged == nil {
			return err
		}
		// Replacing the version makes the server refuse the request if the object has changed.
		body, err := json.Marshal([]map[string]any{
			{"op": "replace", "path": "/metadata/managedFields", "value": merged},
			{"op": "replace", "path": "/metadata/resourceVersion", "value": version},
		})
		if err != nil {
			return fmt.Errorf("encode patch: %w", err)
		}
		_, err = api.Patch(ctx, v.ref.Name, types.JSONPatchType, body, metav1.PatchOptions{FieldManager: kube.FieldManager})
		if !apierrors.IsConflict(err) {
			return ignoreNotFound("take over its fields", err)
		}
		obj, err := api.Get(ctx, v.ref.Name, metav1.GetOptions{})
		if err != nil || obj.UID != existing.UID {
			return ignoreNotFound("read its field managers", err) // applying deals with an object that is replaced
		}
		entries, version = obj.ManagedFields, obj.ResourceVersion
	}
	return errBusy
}

func ignoreNotFound(operation string, err error) error {
	if err == nil || apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("%s: %w", operation, err)
}

// mergePastManagers moves the fields of past managers to the entry of our last apply, and returns the new
// managedFields, or nil if there is nothing to move. An entry has one API version: our last apply's if there is one,
// otherwise preferably next. Entries of past managers with other API versions are not changed.
func mergePastManagers(entries []metav1.ManagedFieldsEntry, next string) ([]metav1.ManagedFieldsEntry, error) {
	version, found := mergeVersion(entries, next)
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
		var set fieldpath.Set
		if err := set.FromJSON(entry.FieldsV1.GetRawReader()); err != nil {
			return nil, fmt.Errorf("decode the fields of manager %s: %w", entry.Manager, err)
		}
		fields = fields.Union(&set)
		if entryTime(entry).After(entryTime(ours)) {
			ours.Time = entry.Time
		}
	}
	if !merges {
		return nil, nil
	}
	raw, err := fields.ToJSON()
	if err != nil {
		return nil, fmt.Errorf("encode the fields taken over: %w", err)
	}
	ours.FieldsV1 = &metav1.FieldsV1{}
	ours.FieldsV1.SetRawBytes(raw)
	return append(rest, ours), nil
}

// mergeVersion returns the API version of the entries to merge. found is false if no entry is ours or a past manager's.
func mergeVersion(entries []metav1.ManagedFieldsEntry, next string) (version string, found bool) {
	var newest metav1.ManagedFieldsEntry
	for _, entry := range entries {
		if inventory.IsOwnApply(entry) {
			return entry.APIVersion, true
		}
		if !isPastManager(entry) || (found && version == next) {
			continue
		}
		if !found || entry.APIVersion == next || entryTime(entry).After(entryTime(newest)) {
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
