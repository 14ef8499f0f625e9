package render

import "testing"

// TestHooksCountOnce adds a template with a hook, which is decoded twice.
func TestHooksCountOnce(t *testing.T) {
	t.Parallel()
	const text = "--- \napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, annotations: {helm.sh/hook: pre-install}}\n"
	builder := &releaseBuilder{}
	if err := builder.addTemplate("templates/a.yaml", text, false); err != nil {
		t.Fatal(err)
	}
	if len(builder.hooks) != 1 || builder.count != 1 || builder.size != len(text) {
		t.Errorf("got %d hooks, %d objects and %d bytes, want 1, 1 and %d", len(builder.hooks), builder.count, builder.size, len(text))
	}
}
