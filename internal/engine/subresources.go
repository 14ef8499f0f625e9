package engine

import (
	"context"
	"fmt"
	"maps"
)

// subresourceStatus is the subresource for the field status. The request to apply an object has no effect on it.
const subresourceStatus = "status"

// applySubresources applies the subresources of an object that was applied before, and returns its resourceVersion
// after that. An object without the field status has no status to apply. Unless the object was created now, it keeps
// its excluded fields.
func (p *applyRun) applySubresources(ctx context.Context, v decision, now *live, created bool) (version string, err error) {
	version = now.Version
	for _, name := range v.subresources {
		send := func(ctx context.Context, t *target, resourceVersion string) (*live, error) {
			body := t.subresourceBody(name, now)
			if body == nil {
				return now, nil
			}
			if resourceVersion != "" {
				mapOf(body["metadata"])["resourceVersion"] = resourceVersion
			}
			raw, err := encode(t.ref, body)
			if err != nil {
				return nil, err
			}
			return p.engine.member.apply(ctx, t, raw, now.UID, name)
		}
		var applied *live
		if created || len(v.excluded) == 0 {
			applied, err = send(ctx, v.target, "")
		} else {
			applied, err = p.sendRetaining(ctx, v, now.UID, send)
		}
		if err != nil {
			return "", fmt.Errorf("apply subresource %s: %w", name, err)
		}
		version = applied.Version
	}
	return version, nil
}

// subresourceBody returns the body of the apply request of a subresource of an applied object: the field status for
// status, the whole content without metadata for another one. It is nil if there is nothing to apply.
func (t *target) subresourceBody(subresource string, now *live) map[string]any {
	body := maps.Clone(t.content)
	if subresource == subresourceStatus {
		status, ok := t.content["status"]
		if !ok {
			return nil
		}
		body = map[string]any{"apiVersion": t.content["apiVersion"], "kind": t.content["kind"], "status": status}
	}
	metadata := map[string]any{"name": t.ref.Name, "uid": string(now.UID)}
	if t.ref.Namespace != "" {
		metadata["namespace"] = t.ref.Namespace
	}
	body["metadata"] = metadata
	return body
}
