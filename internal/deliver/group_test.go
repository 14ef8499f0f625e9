package deliver

import (
	"testing"

	"github.com/towline/towline/internal/bundle"
)

// TestDeletedGroupIsCreated writes a group of which the cache has a version that was deleted a moment ago.
func TestDeletedGroupIsCreated(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.member("deleted")
	b := testBundle(objects("a", "1"))
	mustDeliver(t, h.pull, m, b)
	deleted := h.group(m, b.ID)
	if err := h.pull.deleteGroup(t.Context(), deleted); err != nil {
		t.Fatal(err)
	}
	want, err := deployGroup(m, b, bundle.Digest{}, deleted.Spec.ConfigurationItems)
	if err != nil {
		t.Fatal(err)
	}
	got, err := h.pull.writeGroup(t.Context(), deleted, want)
	if err != nil || got.UID == deleted.UID || h.group(m, b.ID).UID != got.UID {
		t.Errorf("got %v, %v, want another group", got, err)
	}
}
