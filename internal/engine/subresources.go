package engine

import (
	"context"
	"errors"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/kube"
)

// subresourceStatus is the subresource for the field status. The request to apply an object has no effect on it.
const subresourceStatus = "status"

// applySubresources applies the subresources of a target to the object that was applied before, and returns the
// object. An object without the field status has no status to apply.
func (m *memberClient) applySubresources(ctx context.Context, t *target, applied *live) (*live, error) {
	force := true
	for _, name := range t.subresources {
		body := t.body(false, applied.UID)
		if name == subresourceStatus {
			status, ok := t.content["status"]
			if !ok {
				continue
			}
			metadata := map[string]any{"name": t.ref.Name, "uid": string(applied.UID)}
			if t.ref.Namespace != "" {
				metadata["namespace"] = t.ref.Namespace
			}
			body = map[string]any{"apiVersion": t.content["apiVersion"], "kind": t.content["kind"], "metadata": metadata, "status": status}
		}
		raw, err := encode(t.ref, body)
		if err != nil {
			return nil, err
		}
		obj, err := m.at(t.resource, t.ref.Namespace).Patch(ctx, t.ref.Name, types.ApplyPatchType, raw,
			metav1.PatchOptions{FieldManager: kube.FieldManager, Force: &force}, name)
		if err != nil {
			// It is not wrapped: the object itself is valid and exists, so it must be neither recreated nor replaced.
			return nil, errors.New("apply subresource " + name + ": " + err.Error())
		}
		applied = liveOf(obj)
	}
	return applied, nil
}
