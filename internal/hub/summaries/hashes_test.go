package summaries_test

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/status"
)

// TestHashesOfSecretsDoNotConfirmGuesses guesses the values and the patch in a Secret, as a user who may read only
// ClusterSummaries. The hashes in the status must not confirm the guess. Hubs with the same key write the same hashes.
func TestHashesOfSecretsDoNotConfirmGuesses(t *testing.T) {
	t.Parallel()
	const patch = "patch: |\n  - {op: add, path: /data/text, value: secret}\ntarget: {kind: ConfigMap, name: added}\n"
	hub := newHub(interceptor.Funcs{})
	for _, secret := range []*corev1.Secret{
		{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "values"}, Data: map[string][]byte{"values": []byte("password: '1234'\n")}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "patch"}, Data: map[string][]byte{"patch": []byte(patch)}},
	} {
		secret.Type = libv1beta1.ProfileSecretType
		if err := hub.Create(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
	}
	r := requestFor("one", charts(t, with(`password: "{{ .Values.password }}"`)))
	spec := &r.Summary.Spec.ClusterProfileSpec
	spec.HelmCharts[0].ValuesFrom = []configv1beta1.ValueFrom{from(configv1beta1.ValueFromSecret, "values")}
	spec.PatchesFrom = []configv1beta1.ValueFrom{from(configv1beta1.ValueFromSecret, "patch")}

	hashes := func(hub client.Client, key status.HashKey) []string {
		composer := newComposer(t, hub)
		composer.HashKey = key
		made, err := composer.Compose(t.Context(), r, libv1beta1.FeatureHelm)
		if err != nil {
			t.Fatal(err)
		}
		release := made.Releases[0]
		return []string{hex.EncodeToString(release.ValuesHash), hex.EncodeToString(release.PatchesHash)}
	}
	shown := hashes(hub, status.HashKey("a key"))
	if again := hashes(hub, status.HashKey("a key")); !slices.Equal(again, shown) {
		t.Errorf("another hub writes %q instead of %q", again, shown)
	}
	values := sha256.Sum256([]byte(`{"password":"1234"}`))
	for i, guess := range append(hashes(hub, status.HashKey("another key")), hex.EncodeToString(values[:])) {
		if slices.Contains(shown, guess) {
			t.Errorf("guess %d is confirmed by the status", i)
		}
	}
}
