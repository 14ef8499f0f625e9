package engine

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// TestSubresourceBody tests the requests for subresources: they do not change the metadata of the object.
func TestSubresourceBody(t *testing.T) {
	t.Parallel()
	content := func(metadata map[string]any, fields ...string) map[string]any {
		body := map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
		for _, field := range fields {
			body[field] = map[string]any{"key": "value"}
		}
		return body
	}
	now := &live{LiveMeta: inventory.LiveMeta{UID: "uid"}}
	identity := map[string]any{"name": "it", "namespace": "ns", "uid": "uid"}
	labelled := map[string]any{"name": "it", "namespace": "ns", "labels": map[string]any{"a": "b"}}
	for name, test := range map[string]struct {
		subresource   string
		content, want map[string]any
	}{
		"status":         {"status", content(labelled, "spec", "status"), content(identity, "status")},
		"without status": {"status", content(labelled, "spec"), nil},
		"another one":    {"resize", content(labelled, "spec"), content(identity, "spec")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			target := &target{ref: kube.Ref{Version: "v1", Kind: "Pod", Namespace: "ns", Name: "it"}, content: test.content}
			if diff := cmp.Diff(test.want, target.subresourceBody(test.subresource, now)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
