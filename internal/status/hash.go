package status

import (
	"crypto/hmac"
	"crypto/sha256"

	"github.com/towline/towline/internal/bundle"
)

// HashKey is the HMAC key of the hashes in the status of ClusterSummaries. Users who may not read Secrets can read the
// status: with a plain hash of the content they could test guesses of a password in it.
type HashKey []byte

// Hash returns the hash of content.
func (k HashKey) Hash(content []byte) []byte {
	mac := hmac.New(sha256.New, k)
	_, _ = mac.Write(content) // a hash returns no error
	return mac.Sum(nil)
}

// HashOf returns FeatureSummary.Hash for the bundle with a digest.
func (k HashKey) HashOf(digest bundle.Digest) []byte { return k.Hash(digest[:]) }

// IsHashOf returns whether hash is FeatureSummary.Hash for the bundle with a digest. It accepts the digest itself,
// which earlier versions wrote. An empty hash is the hash of the zero Digest.
func (k HashKey) IsHashOf(hash []byte, digest bundle.Digest) bool {
	return hmac.Equal(hash, k.HashOf(digest)) || bundle.DigestFromBytes(hash) == digest
}
