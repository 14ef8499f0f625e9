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

// adoptTries is how often an object that changes all the time is read again before its fields are taken over.
const adoptTries = 5

// isPastManager says whether an entry lists fields that a tool has written which stops managing an object that is adopted: kubectl and all its
// commands, and helm, whether they apply on the client or on the server. Controllers, what they report as status, and unknown tools are not.
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

// adoptFields takes over the fields of an object that nobody has marked and that is not in the record.
func (p *pass) adoptFields(ctx context.Context, v verdict) error {
	if v.seen == nil || v.seen.IsMarked() || p.prior.Entries[v.key()].UID == v.seen.UID {
		return nil
	}
	return p.takeFields(ctx, v, v.seen)
}

// adoptCreated applies once more an object that somebody created between reading and applying it.
func (p *pass) adoptCreated(ctx context.Context, v verdict, now *live) (*live, error) {
	v.adopt = true
	if err := p.takeFields(ctx, v, now); err != nil {
		return nil, err
	}
	return p.request(ctx, v, now.UID)
}

// takeFields makes the fields that past managers have set on an object that is adopted ours, so that the next apply deletes those that the bundle
// lacks. Without that they would stay for good. It makes no request for an object that no past manager has written.
func (p *pass) takeFields(ctx context.Context, v verdict, seen *live) error {
	api := p.engine.member.at(v.resource, v.ref.Namespace)
	entries, version := seen.managers, seen.Version
	for range adoptTries {
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
		if err != nil || obj.UID != seen.UID {
			return ignoreNotFound("read its field managers", err) // applying deals with an object that is replaced
		}
		entries, version = obj.ManagedFields, obj.ResourceVersion
	}
	return errBusy
}

func ignoreNotFound(what string, err error) error {
	if err == nil || apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// mergePastManagers returns entries with the fields of past managers in the entry of our last apply; nil if there is nothing to merge. One entry
// can only list the fields of one API version: that of our last apply or else, if there is a choice, of the next one. Entries of past managers
// in other versions stay.
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

// mergeVersion returns the API version of the entries to merge; found is false if there are no entries of past managers or ours.
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
