package status_test

import (
	"bytes"
	"crypto/sha256"
	"testing"

	"github.com/google/go-cmp/cmp"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/status"
)

// TestHashesDoNotConfirmGuesses guesses the content behind a hash: without the key the hash cannot be computed.
func TestHashesDoNotConfirmGuesses(t *testing.T) {
	t.Parallel()
	content := []byte(`{"password":"1234"}`)
	digest := bundle.Digest(sha256.Sum256(content))
	shown := key.HashOf(digest)
	for name, guess := range map[string][]byte{
		"the digest": digest[:], "the digest of the digest": status.HashKey(nil).HashOf(digest), "another key": status.HashKey("other").HashOf(digest),
	} {
		if bytes.Equal(shown, guess) {
			t.Errorf("%s confirms the guess", name)
		}
	}
	if bytes.Equal(key.Hash(content), digest[:]) {
		t.Error("the digest of the values confirms the guess")
	}
	if !bytes.Equal(shown, key.HashOf(digest)) || !key.IsHashOf(shown, digest) || key.IsHashOf(shown, one) {
		t.Error("the hash does not identify the bundle")
	}
}

// TestHashOfAnEarlierVersion upgrades a status with a plain hash: the bundle is the same, and only the hash changes.
func TestHashOfAnEarlierVersion(t *testing.T) {
	t.Parallel()
	old := feature(libv1beta1.FeatureStatusProvisioned, one, "")
	old.Hash, old.LastAppliedTime = one[:], noonAt
	report := bundle.Report{State: bundle.StateApplied, Digest: one, LastApplied: noon.AddDate(0, 0, 1)}
	got := status.ComputeStatus(configv1beta1.ClusterSummaryStatus{FeatureSummaries: []configv1beta1.FeatureSummary{old}}, status.ReconcileResult{
		HashKey:  key,
		Features: []status.FeatureResult{{Feature: old.FeatureID, Kind: status.Delivered, DesiredDigest: one, Report: report}},
	})
	want := old
	want.Hash = key.HashOf(one)
	if diff := cmp.Diff(got.FeatureSummaries, []configv1beta1.FeatureSummary{want}); diff != "" {
		t.Errorf("status (-got +want):\n%s", diff)
	}
}
