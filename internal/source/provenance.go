package source

import (
	"bytes"
	"context"
	"errors"

	"github.com/ProtonMail/go-crypto/openpgp"
	"helm.sh/helm/v4/pkg/provenance"

	"github.com/towline/towline/internal/phase"
)

// maxProvenanceBytes limits a provenance file: a Chart.yaml and a signature, which need a few KiB.
const maxProvenanceBytes = 4 << 20

// verifyProvenance verifies the archive with its provenance file and the keys in keyring, as `helm pull --verify` does.
func verifyProvenance(ctx context.Context, repo repository, keyring []byte, got download) error {
	keys, err := readKeyring(keyring)
	if err != nil {
		return phase.Invalidf("key %s: %s", keyKeyring, oneLine(err))
	}
	file, err := repo.downloadProvenance(ctx, got.at)
	if errors.Is(err, ErrNotFound) {
		return unverified("the chart has no provenance file")
	}
	if err != nil {
		return err
	}
	signatory := &provenance.Signatory{KeyRing: keys}
	if _, err := signatory.Verify(got.archive, file, got.at.file); err != nil {
		return unverified("%s", oneLine(err))
	}
	return nil
}

// readKeyring parses the OpenPGP keys of `gpg --export`, with or without --armor.
func readKeyring(raw []byte) (openpgp.EntityList, error) {
	read := openpgp.ReadKeyRing
	if bytes.HasPrefix(bytes.TrimSpace(raw), []byte("-----BEGIN PGP")) {
		read = openpgp.ReadArmoredKeyRing
	}
	keys, err := read(bytes.NewReader(raw))
	if err == nil && len(keys) == 0 {
		err = errors.New("it holds no keys")
	}
	return keys, err
}
