package bundle

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
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

// Digest returns KnownDigest if it is set, otherwise the digest of b's content, owner and options. It does not cover
// ReleaseData.Defaults, so that agents of versions without them calculate the same digest. It fails only if an object
// cannot be encoded.
func (b Bundle) Digest() (Digest, error) {
	if b.KnownDigest != (Digest{}) {
		return b.KnownDigest, nil
	}
	sum := sha256.New()
	if err := b.writeJSON(sum); err != nil {
		return Digest{}, fmt.Errorf("encode bundle %s: %w", b.ID, err)
	}
	return Digest(sum.Sum(nil)), nil
}

// writeJSON writes the same bytes to out as json.Marshal returns for b, with the objects from Item.Documents. They are
// canonical: encoding/json writes struct fields in order and map keys sorted.
func (b Bundle) writeJSON(out io.Writer) error {
	items := b.Items
	if len(items) > 0 {
		b.Items = nil
	}
	raw, err := json.Marshal(b)
	if err != nil {
		return err
	}
	// Quotes within strings are escaped, so the first match is the field.
	before, after, found := bytes.Cut(raw, []byte(`"items":null`))
	if !found || len(items) == 0 {
		_, _ = out.Write(raw) // a hash returns no error
		return nil
	}
	_, _ = out.Write(before)
	_, _ = io.WriteString(out, `"items":[`)
	for i, item := range items {
		if i > 0 {
			_, _ = io.WriteString(out, ",")
		}
		if err := item.writeJSON(out); err != nil {
			return err
		}
	}
	_, _ = io.WriteString(out, "]")
	_, _ = out.Write(after)
	return nil
}

// writeJSON writes the JSON of an item without ReleaseData.Defaults.
func (i Item) writeJSON(out io.Writer) error {
	docs, err := i.Documents.Encode(i.Objects)
	if err != nil {
		return err
	}
	if i.Release != nil {
		release := *i.Release
		release.Data.Defaults = nil
		i.Release = &release
	}
	if len(docs) > 0 {
		i.Objects = nil
	}
	raw, err := json.Marshal(i)
	if err != nil {
		return err
	}
	after, found := bytes.CutPrefix(raw, []byte(`{"objects":null`))
	if !found || len(docs) == 0 {
		_, _ = out.Write(raw)
		return nil
	}
	separator := `{"objects":[`
	for _, doc := range docs {
		_, _ = io.WriteString(out, separator)
		_, _ = out.Write(doc)
		separator = ","
	}
	_, _ = io.WriteString(out, "]")
	_, _ = out.Write(after)
	return nil
}
