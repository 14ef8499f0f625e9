package source

import (
	"bytes"
	"context"
	"crypto"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/sigstore/sigstore-go/pkg/bundle"
	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/tuf"
	"github.com/sigstore/sigstore-go/pkg/verify"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	"github.com/theupdateframework/go-tuf/v2/metadata/fetcher"

	"github.com/towline/towline/internal/phase"
)

// signStatement is the predicate type of cosign's signatures. Statements of other types, such as build provenance, are
// attestations, which do not count as signatures.
const signStatement = "https://sigstore.dev/cosign/sign/v1"

// cosignSignature is a signature of an artifact in one of cosign's two layouts. In the legacy layout of cosign 2 a
// signature is a layer under the tag sha256-<digest>.sig. In the layout of cosign 3 it is a Sigstore bundle that refers
// to the artifact.
type cosignSignature struct {
	bundle *bundle.Bundle
	// payload is the signed text in the legacy layout. It contains the digest of the artifact. It is nil for a Sigstore
	// bundle, which signs the artifact.
	payload []byte
}

// cosignRegistry lists the cosign signatures of an artifact, one method per layout. The second result has an error for
// each signature that cannot be parsed.
type cosignRegistry interface {
	legacySignatures(ctx context.Context, at location) ([]cosignSignature, []error, error)
	bundleSignatures(ctx context.Context, at location) ([]cosignSignature, []error, error)
}

var _ cosignRegistry = (*ociRegistry)(nil)

// verifySignature returns nil if at least one signature of the artifact is valid and meets required.
func (c *Charts) verifySignature(ctx context.Context, repo repository, required SignatureRequirement, at location) error {
	registry, ok := repo.(cosignRegistry)
	if !ok {
		return phase.TerminalErrorf("cosign signs charts in OCI registries (oci://) only")
	}
	policy, err := c.newSignaturePolicy(required)
	if err != nil {
		return err
	}
	var failures []error
	for _, list := range []func(context.Context, location) ([]cosignSignature, []error, error){
		registry.legacySignatures, registry.bundleSignatures,
	} {
		signatures, unreadable, err := list(ctx, at)
		if err != nil {
			return err
		}
		failures = append(failures, unreadable...)
		for _, candidate := range signatures {
			err := policy.verify(candidate, at.digest)
			if err == nil {
				return nil
			}
			failures = append(failures, err)
		}
	}
	switch len(failures) {
	case 0:
		return unverified("the chart has no cosign signature")
	case 1:
		return unverified("its cosign signature is not valid: %s", oneLine(failures[0]))
	}
	last := failures[len(failures)-1]
	return unverified("none of its %d cosign signatures is valid, the last one because: %s", len(failures), oneLine(last))
}

// signaturePolicy is a SignatureRequirement in the form of the sigstore library.
type signaturePolicy struct {
	verifier *verify.Verifier
	options  []verify.PolicyOption
}

// newSignaturePolicy returns the policy for a SignatureRequirement. It fails with phase.TerminalError if required is
// not valid, and with another error if the public trust root cannot be fetched.
func (c *Charts) newSignaturePolicy(required SignatureRequirement) (signaturePolicy, error) {
	if required.PublicKey != nil {
		return newPublicKeyPolicy(required.PublicKey)
	}
	trusted, err := c.trustRoot(required.TrustRoot)
	if err != nil {
		return signaturePolicy{}, err
	}
	options := []verify.VerifierOption{verify.WithTransparencyLog(1), verify.WithObserverTimestamps(1)}
	if len(trusted.CTLogs()) > 0 {
		options = append(options, verify.WithSignedCertificateTimestamps(1))
	}
	verifier, err := verify.NewVerifier(trusted, options...)
	if err != nil {
		return signaturePolicy{}, phase.TerminalErrorf("the trust root: %s", oneLine(err))
	}
	policy := signaturePolicy{verifier: verifier}
	for _, match := range required.Identities {
		identity, err := verify.NewShortCertificateIdentity("", match.Issuer, "", match.Subject)
		if err != nil {
			return signaturePolicy{}, phase.TerminalErrorf("matchOIDCIdentity: %s", oneLine(err))
		}
		policy.options = append(policy.options, verify.WithCertificateIdentity(identity))
	}
	return policy, nil
}

// newPublicKeyPolicy returns the policy for signatures of one public key. They need no entry in a transparency log and
// no timestamp, since the key has no validity period.
func newPublicKeyPolicy(pem []byte) (signaturePolicy, error) {
	key, err := cryptoutils.UnmarshalPEMToPublicKey(pem)
	if err != nil {
		return signaturePolicy{}, phase.TerminalErrorf("key %s is not a public key in PEM: %s", keyPublicKey, oneLine(err))
	}
	loaded, err := signature.LoadVerifier(key, crypto.SHA256)
	if err != nil {
		return signaturePolicy{}, phase.TerminalErrorf("key %s: %s", keyPublicKey, oneLine(err))
	}
	unlimited := root.NewExpiringKey(loaded, time.Time{}, time.Time{})
	trusted := root.NewTrustedPublicKeyMaterial(func(string) (root.TimeConstrainedVerifier, error) {
		return unlimited, nil
	})
	verifier, err := verify.NewVerifier(trusted, verify.WithNoObserverTimestamps())
	if err != nil {
		return signaturePolicy{}, phase.TerminalErrorf("key %s: %s", keyPublicKey, oneLine(err))
	}
	return signaturePolicy{verifier: verifier, options: []verify.PolicyOption{verify.WithKey()}}, nil
}

// trustRoot parses a trusted_root.json. Nil means the trust root of Sigstore's public services.
func (c *Charts) trustRoot(trustedRoot []byte) (root.TrustedMaterial, error) {
	if trustedRoot == nil {
		// Concurrent fetches would write to the same directory.
		public, err, _ := c.flights.Do("public trust root", func() (any, error) { return c.publicRoot() })
		if err != nil {
			return nil, fmt.Errorf("fetch the public trust root of Sigstore (secretRef can name another): %w", stableError(err))
		}
		return public.(root.TrustedMaterial), nil
	}
	trusted, err := root.NewTrustedRootFromJSON(trustedRoot)
	if err != nil {
		return nil, phase.TerminalErrorf("key %s: %s", keyTrustRoot, oneLine(err))
	}
	return trusted, nil
}

// publicRoot returns a function that fetches the trust root of Sigstore's public services and caches it in dir for a
// day. The options can name another TUF repository.
func publicRoot(dir string, options *tuf.Options) func() (root.TrustedMaterial, error) {
	return func() (root.TrustedMaterial, error) {
		transport, err := newTransport(Login{}, nil) // the operator of the hub chooses this address
		if err != nil {
			return nil, err
		}
		defer transport.CloseIdleConnections()
		httpFetcher := fetcher.NewDefaultFetcher()
		httpFetcher.SetHTTPClient(&http.Client{Transport: transport, Timeout: headerTimeout})
		return root.FetchTrustedRootWithOptions(options.WithCachePath(dir).WithCacheValidity(1).WithFetcher(httpFetcher))
	}
}

// verify returns nil if the policy accepts the signature and the signature is of the artifact with the digest.
func (p signaturePolicy) verify(signed cosignSignature, digest string) error {
	artifact := verify.WithArtifact(bytes.NewReader(signed.payload))
	if signed.payload == nil {
		algorithm, sum, _ := strings.Cut(digest, ":")
		raw, err := hex.DecodeString(sum)
		if err != nil {
			return fmt.Errorf("parse digest %s: %w", digest, err)
		}
		artifact = verify.WithArtifactDigest(algorithm, raw)
	}
	result, err := p.verifier.Verify(signed.bundle, verify.NewPolicy(artifact, p.options...))
	if err != nil {
		return err
	}
	if result.Statement != nil && result.Statement.GetPredicateType() != signStatement {
		return errors.New("it is no signature but a statement of another type")
	}
	if signed.payload == nil {
		return nil
	}
	return checkPayload(signed.payload, digest)
}

// checkPayload returns nil if the signed text of a legacy signature contains the digest of the artifact. Errors contain
// no part of the text.
func checkPayload(payload []byte, digest string) error {
	var claim struct {
		Critical struct {
			Image struct {
				Digest string `json:"docker-manifest-digest"`
			} `json:"image"`
			Type string `json:"type"`
		} `json:"critical"`
	}
	if err := json.Unmarshal(payload, &claim); err != nil {
		return errors.New("the signed text is not JSON")
	}
	if claim.Critical.Type != "cosign container image signature" {
		return errors.New("the signed text is not of the type of cosign's signatures")
	}
	if claim.Critical.Image.Digest != digest {
		return fmt.Errorf("it signs another artifact, not %s", digest)
	}
	return nil
}
