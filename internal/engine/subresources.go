package engine

import (
	"context"
	"fmt"
	"maps"
)

// subresourceStatus is the subresource for the field status. The request to apply an object has no effect on it.
const subresourceStatus = "status"

// applySubresources applies the subresources of an object that was applied before, and returns its new resourceVersion.
// An object without the field status has no status to apply. Unless created is true, excluded fields are left alone.
func (p *applyRun) applySubresources(ctx context.Context, v decision, applied *live, created bool) (version string, err error) {
	version = applied.Version
	for _, name := range v.subresources {
		send := func(ctx context.Context, t *target, resourceVersion string) (*live, error) {
			body := t.subresourceBody(name, applied)
			if body == nil {
				return applied, nil
			}
			if resourceVersion != "" {
				mapOf(body["metadata"])["resourceVersion"] = resourceVersion
			}
			raw, err := encodeBody(t.ref, body)
			if err != nil {
				return nil, err
			}
			return p.engine.member.apply(ctx, t, raw, applied.UID, name)
		}
		var result *live
		if created || len(v.excluded) == 0 {
			result, err = send(ctx, v.target, "")
		} else {
			result, err = p.sendRetaining(ctx, v, applied.UID, send)
		}
		if err != nil {
			return "", fmt.Errorf("apply subresource %s: %w", name, err)
		}
		version = result.Version
	}
	return version, nil
}

// subresourceBody returns the body of the apply request of a subresource of an applied object: the field status for
// status, the whole content without metadata for another one. It is nil if there is nothing to apply.
func (t *target) subresourceBody(subresource string, applied *live) map[string]any {
	body := maps.Clone(t.content)
	if subresource == subresourceStatus {
		status, ok := t.content["status"]
		if !ok {
			return nil
		}
		body = map[string]any{"apiVersion": t.content["apiVersion"], "kind": t.content["kind"], "status": status}
	}
	metadata := map[string]any{"name": t.ref.Name, "uid": string(applied.UID)}
	if t.ref.Namespace != "" {
		metadata["namespace"] = t.ref.Namespace
	}
	body["metadata"] = metadata
	return body
}
