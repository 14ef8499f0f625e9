package summaries

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
)

// storesOf returns a function that makes stores of one release.
func storesOf(hub client.Client) func() *generatedStore {
	return func() *generatedStore {
		return &generatedStore{
			hub: hub, member: fleet.Member{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one", UID: "one"},
			summary: &configv1beta1.ClusterSummary{}, release: match.Release{Namespace: "site", Name: "web"},
			ensureFinalizer: func(context.Context) error { return nil },
		}
	}
}

// TestSavedGeneratedValuesCanBeLoaded saves values that a Secret holds only because they are compressed.
func TestSavedGeneratedValuesCanBeLoaded(t *testing.T) {
	t.Parallel()
	newStore := storesOf(fake.NewClientBuilder().WithScheme(kube.Scheme()).Build())
	large := func(size int) json.RawMessage { return json.RawMessage(`"` + strings.Repeat("a", size) + `"`) }
	for _, used := range []render.Generated{{"first": large(35 << 20)}, {"second": large(35 << 20)}} {
		store := newStore()
		if _, err := store.load(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := store.save(t.Context(), "", used); err != nil {
			t.Fatal(err)
		}
		stored, err := newStore().load(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !equalGenerated(stored, used) {
			t.Error("the loaded values are not the used ones")
		}
	}
	store := newStore()
	if _, err := store.load(t.Context()); err != nil {
		t.Fatal(err)
	}
	err := store.save(t.Context(), "", render.Generated{"third": large(65 << 20)})
	var invalid phase.TerminalError
	if !errors.As(err, &invalid) || !strings.Contains(err.Error(), "the limit is 64") {
		t.Errorf("got %v, want a refusal that names the limit", err)
	}
}

// TestGeneratedPasswordsAreDroppedLast saves values that hardly compress.
func TestGeneratedPasswordsAreDroppedLast(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		sizes            map[string]int // of the texts in KiB
		want             []string
		hasUnknownInputs bool // the next rendering can look up something else
	}{
		"all fit":            {map[string]int{"password": 600, "lookup a": 200, "rendered a": 100}, []string{"lookup a", "password", "rendered a"}, false},
		"without rendered":   {map[string]int{"password": 600, "lookup a": 200, "rendered a": 600}, []string{"lookup a", "password"}, false},
		"without any lookup": {map[string]int{"password": 600, "lookup a": 800, "rendered a": 10}, []string{"password"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newStore := storesOf(fake.NewClientBuilder().WithScheme(kube.Scheme()).Build())
			used := render.Generated{}
			for key, size := range test.sizes {
				random := make([]byte, size<<10*3/4)
				_, _ = rand.Read(random)
				used[key] = json.RawMessage(strconv.Quote(base64.StdEncoding.EncodeToString(random)))
			}
			for range 2 {
				store := newStore()
				if _, err := store.load(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := store.save(t.Context(), "", used); err != nil {
					t.Fatal(err)
				}
				stored, err := newStore().load(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(test.want, slices.Sorted(maps.Keys(stored))); diff != "" {
					t.Errorf("stored keys (-want +got):\n%s", diff)
				}
				if from := store.addInputs(builtInputs{}); from.hasUnknownInputs != test.hasUnknownInputs || from.generated[0].Version != store.secret.ResourceVersion {
					t.Errorf("got inputs %+v, want unknown ones: %t", from, test.hasUnknownInputs)
				}
			}
		})
	}
}
