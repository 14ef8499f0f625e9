package bundle

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
)

// Digest is the SHA-256 of a bundle's canonical form. Equal bundles have equal digests. The zero Digest stands for no
// bundle.
type Digest [sha256.Size]byte

// String returns sha256:<hex>, or "" for the zero Digest.
func (d Digest) String() string {
	if d == (Digest{}) {
		return ""
	}
	return "sha256:" + hex.EncodeToString(d[:])
}

// DigestFromBytes returns the Digest with these bytes, or the zero Digest if there are not 32 bytes.
func DigestFromBytes(raw []byte) Digest {
	var d Digest
	if len(raw) == len(d) {
		copy(d[:], raw)
	}
	return d
}

// Digest returns the digest of b's content, owner and options. ReleaseData.Defaults are no part of it, so that agents
// of versions without them calculate the same. It fails only if an object cannot be encoded.
func (b Bundle) Digest() (Digest, error) {
	b.Items = slices.Clone(b.Items)
	for i, item := range b.Items {
		if item.Release != nil {
			release := *item.Release
			release.Data.Defaults = nil
			b.Items[i].Release = &release
		}
	}
	// encoding/json writes struct fields in order and map keys sorted, so the bytes are canonical.
	raw, err := json.Marshal(b)
	if err != nil {
		return Digest{}, fmt.Errorf("encode bundle %s: %w", b.ID, err)
	}
	return sha256.Sum256(raw), nil
}
