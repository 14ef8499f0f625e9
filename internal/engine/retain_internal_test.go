package engine

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestLastItemsFirst has an order in which a deletion of an item of a list changes no index of a later path.
func TestLastItemsFirst(t *testing.T) {
	t.Parallel()
	got := lastItemsFirst([]jsonPath{{"items", "0"}, {"items", "2", "image"}, {"items", "10"}, {"data"}, {"items", "0"}})
	if diff := cmp.Diff([]jsonPath{{"items", "10"}, {"items", "2", "image"}, {"items", "0"}, {"data"}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
