package source

import (
	"bytes"
	"context"
	"errors"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/clearsign"
	"helm.sh/helm/v4/pkg/provenance"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// maxProvenanceBytes limits a provenance file. It contains a Chart.yaml and a signature, which need a few KiB.
const maxProvenanceBytes = 4 << 20

// verifyProvenance verifies the archive with its provenance file and the keys in keyring, as `helm pull --verify` does.
func verifyProvenance(ctx context.Context, repo repository, keyring []byte, got downloadedChart) error {
	keys, err := readKeyring(keyring)
	if err != nil {
		return phase.TerminalErrorf("key %s: %s", keyKeyring, oneLine(err))
	}
	file, err := repo.downloadProvenance(ctx, got.at)
	if errors.Is(err, ErrNotFound) {
		return unverified("the chart has no provenance file")
	}
	if err != nil {
		return err
	}
	if err := checkProvenance(file); err != nil {
		return unverified("the provenance file: %s", oneLine(err))
	}
	signatory := &provenance.Signatory{KeyRing: keys}
	if _, err := signatory.Verify(got.archive, file, got.at.file); err != nil {
		return unverified("%s", oneLine(err))
	}
	return nil
}

// checkProvenance returns an error if Helm would need too much memory to parse a provenance file. A valid signature is
// no protection: tenants choose the keys.
func checkProvenance(file []byte) error {
	block, _ := clearsign.Decode(file)
	if block == nil {
		return nil // Helm reports it
	}
	for part := range bytes.SplitSeq(block.Plaintext, []byte("\n...\n")) { // as Helm does
		if err := kube.CheckValueCount(part); err != nil {
			return err
		}
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
