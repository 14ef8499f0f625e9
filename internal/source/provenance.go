package source

import (
	"bytes"
	"context"
	"errors"

	"github.com/ProtonMail/go-crypto/openpgp"
	"helm.sh/helm/v4/pkg/provenance"

	"github.com/towline/towline/internal/phase"
)

// maxProvenance is far more than a Chart.yaml and a signature need.
const maxProvenance = 4 << 20

// verifyProvenance checks the archive against the provenance file beside it, as Helm does with --verify.
func verifyProvenance(ctx context.Context, from repository, keyring []byte, got download) error {
	keys, err := readKeyring(keyring)
	if err != nil {
		return phase.Invalidf("key %s: %s", keyKeyring, reason(err))
	}
	file, err := from.provenance(ctx, got.at)
	if errors.Is(err, ErrNotFound) {
		return unverified("the chart has no provenance file")
	}
	if err != nil {
		return err
	}
	signatory := &provenance.Signatory{KeyRing: keys}
	if _, err := signatory.Verify(got.archive, file, got.at.file); err != nil {
		return unverified("%s", reason(err))
	}
	return nil
}

// readKeyring reads OpenPGP keys, as gpg --export writes them with and without --armor.
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
