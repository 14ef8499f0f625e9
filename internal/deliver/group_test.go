package deliver

import (
	"testing"

	"github.com/towline/towline/internal/bundle"
)

// TestDeletedGroupIsCreated writes a group that was deleted a moment ago and is still in the cache.
func TestDeletedGroupIsCreated(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("deleted")
	b := testBundle(objects("a", "1"))
	mustDeliver(t, h.pull, m, b)
	deleted := h.getGroup(m, b.ID)
	if err := h.pull.deleteGroup(t.Context(), deleted); err != nil {
		t.Fatal(err)
	}
	want, err := deployGroup(m, b, bundle.Digest{}, deleted.Spec.ConfigurationItems)
	if err != nil {
		t.Fatal(err)
	}
	got, err := h.pull.writeGroup(t.Context(), deleted, want)
	if err != nil || got.UID == deleted.UID || h.getGroup(m, b.ID).UID != got.UID {
		t.Errorf("got %v, %v, want another group", got, err)
	}
}
