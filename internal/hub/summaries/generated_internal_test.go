package summaries

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
)

// TestSavedGeneratedValuesCanBeLoaded saves values that a Secret holds only because they are compressed.
func TestSavedGeneratedValuesCanBeLoaded(t *testing.T) {
	t.Parallel()
	large := func(size int) json.RawMessage { return json.RawMessage(`"` + strings.Repeat("a", size) + `"`) }
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).Build()
	newStore := func() *generatedStore {
		return &generatedStore{
			hub: hub, member: fleet.Member{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one", UID: "one"},
			summary: &configv1beta1.ClusterSummary{}, release: match.Release{Namespace: "site", Name: "web"},
			ensureFinalizer: func(context.Context) error { return nil },
		}
	}
	for _, used := range []render.Generated{{"first": large(35 << 20)}, {"second": large(35 << 20)}} {
		store := newStore()
		if _, err := store.load(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := store.save(t.Context(), used); err != nil {
			t.Fatal(err)
		}
		stored, err := newStore().load(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !isSame(stored, used) {
			t.Error("the loaded values are not the used ones")
		}
	}
	store := newStore()
	if _, err := store.load(t.Context()); err != nil {
		t.Fatal(err)
	}
	err := store.save(t.Context(), render.Generated{"third": large(65 << 20)})
	var invalid phase.Invalid
	if !errors.As(err, &invalid) || !strings.Contains(err.Error(), "the limit is 64") {
		t.Errorf("got %v, want a refusal that names the limit", err)
	}
}
