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

// signStatement is the type of the statement with which cosign signs an artifact. Other statements about it, such as
// how it was built, are no signatures.
const signStatement = "https://sigstore.dev/cosign/sign/v1"

// cosigned is a signature that cosign wrote beside an artifact.
type cosigned struct {
	bundle *bundle.Bundle
	// payload is the text that is signed in cosign's classic layout. It names the artifact. Nil: the bundle signs the
	// artifact itself.
	payload []byte
}

// cosignRegistry finds the signatures that cosign wrote for an artifact.
type cosignRegistry interface {
	// classicSignatures returns the signatures of cosign's classic layout, and the error of each that cannot be read.
	classicSignatures(ctx context.Context, at location) ([]cosigned, []error, error)
	// bundleSignatures returns the signatures in Sigstore bundles, and the error of each that cannot be read.
	bundleSignatures(ctx context.Context, at location) ([]cosigned, []error, error)
}

var _ cosignRegistry = (*ociRegistry)(nil)

// verifySignature checks that one of the artifact's signatures is the one that is demanded.
func (c *Charts) verifySignature(ctx context.Context, from repository, wanted Signature, at location) error {
	registry, ok := from.(cosignRegistry)
	if !ok {
		return phase.Invalidf("cosign signs charts in OCI registries (oci://) only")
	}
	demand, err := c.demandFor(wanted)
	if err != nil {
		return err
	}
	var failures []error
	for _, list := range []func(context.Context, location) ([]cosigned, []error, error){
		registry.classicSignatures, registry.bundleSignatures,
	} {
		found, unreadable, err := list(ctx, at)
		if err != nil {
			return err
		}
		failures = append(failures, unreadable...)
		for _, candidate := range found {
			err := demand.check(candidate, at.digest)
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
		return unverified("its cosign signature is not valid: %s", reason(failures[0]))
	}
	return unverified("none of its %d cosign signatures is valid, the last one because: %s", len(failures), reason(failures[len(failures)-1]))
}

// demand is a Signature, ready to check signatures against.
type demand struct {
	verifier *verify.Verifier
	policy   []verify.PolicyOption
}

// demandFor returns errors that are phase.Invalid, except for those about reaching the public trust root.
func (c *Charts) demandFor(wanted Signature) (demand, error) {
	if wanted.PublicKey != nil {
		return keyDemand(wanted.PublicKey)
	}
	trusted, err := c.trustRoot(wanted.TrustRoot)
	if err != nil {
		return demand{}, err
	}
	options := []verify.VerifierOption{verify.WithTransparencyLog(1), verify.WithObserverTimestamps(1)}
	if len(trusted.CTLogs()) > 0 {
		options = append(options, verify.WithSignedCertificateTimestamps(1))
	}
	verifier, err := verify.NewVerifier(trusted, options...)
	if err != nil {
		return demand{}, phase.Invalidf("the trust root: %s", reason(err))
	}
	identities := demand{verifier: verifier}
	for _, match := range wanted.Identities {
		identity, err := verify.NewShortCertificateIdentity("", match.Issuer, "", match.Subject)
		if err != nil {
			return demand{}, phase.Invalidf("matchOIDCIdentity: %s", reason(err))
		}
		identities.policy = append(identities.policy, verify.WithCertificateIdentity(identity))
	}
	return identities, nil
}

// keyDemand asks for no transparency log, as the owner of the key vouches for the signature.
func keyDemand(pem []byte) (demand, error) {
	key, err := cryptoutils.UnmarshalPEMToPublicKey(pem)
	if err != nil {
		return demand{}, phase.Invalidf("key %s is not a public key in PEM: %s", keyPublicKey, reason(err))
	}
	loaded, err := signature.LoadVerifier(key, crypto.SHA256)
	if err != nil {
		return demand{}, phase.Invalidf("key %s: %s", keyPublicKey, reason(err))
	}
	always := root.NewExpiringKey(loaded, time.Time{}, time.Time{})
	trusted := root.NewTrustedPublicKeyMaterial(func(string) (root.TimeConstrainedVerifier, error) { return always, nil })
	verifier, err := verify.NewVerifier(trusted, verify.WithNoObserverTimestamps())
	if err != nil {
		return demand{}, phase.Invalidf("key %s: %s", keyPublicKey, reason(err))
	}
	return demand{verifier: verifier, policy: []verify.PolicyOption{verify.WithKey()}}, nil
}

func (c *Charts) trustRoot(given []byte) (root.TrustedMaterial, error) {
	if given == nil {
		// One at a time: they write to the same directory.
		public, err, _ := c.flights.Do("public trust root", func() (any, error) { return c.publicRoot() })
		if err != nil {
			return nil, fmt.Errorf("fetch the public trust root of Sigstore (secretRef can name another): %w", plain(err))
		}
		return public.(root.TrustedMaterial), nil
	}
	trusted, err := root.NewTrustedRootFromJSON(given)
	if err != nil {
		return nil, phase.Invalidf("key %s: %s", keyTrustRoot, reason(err))
	}
	return trusted, nil
}

// publicRoot fetches the trust root of Sigstore's public services, or what options have in their place, and keeps it in
// dir for a day.
func publicRoot(dir string, options *tuf.Options) func() (root.TrustedMaterial, error) {
	return func() (root.TrustedMaterial, error) {
		transport, err := newTransport(Login{})
		if err != nil {
			return nil, err
		}
		defer transport.CloseIdleConnections()
		bounded := fetcher.NewDefaultFetcher()
		bounded.SetHTTPClient(&http.Client{Transport: transport, Timeout: headerTimeout})
		return root.FetchTrustedRootWithOptions(options.WithCachePath(dir).WithCacheValidity(1).WithFetcher(bounded))
	}
}

// check returns nil if the signature is one of the artifact with digest, and is the one that is demanded.
func (d demand) check(signed cosigned, digest string) error {
	artifact := verify.WithArtifact(bytes.NewReader(signed.payload))
	if signed.payload == nil {
		algorithm, sum, _ := strings.Cut(digest, ":")
		raw, err := hex.DecodeString(sum)
		if err != nil {
			return fmt.Errorf("parse digest %s: %w", digest, err)
		}
		artifact = verify.WithArtifactDigest(algorithm, raw)
	}
	result, err := d.verifier.Verify(signed.bundle, verify.NewPolicy(artifact, d.policy...))
	if err != nil {
		return err
	}
	if result.Statement != nil && result.Statement.GetPredicateType() != signStatement {
		return fmt.Errorf("it is no signature but a statement of type %s", result.Statement.GetPredicateType())
	}
	if signed.payload == nil {
		return nil
	}
	return checkPayload(signed.payload, digest)
}

// checkPayload checks that a signed text of cosign's classic layout is about the artifact with digest.
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
		return fmt.Errorf("the signed text is of type %q", claim.Critical.Type)
	}
	if claim.Critical.Image.Digest != digest {
		return fmt.Errorf("it signs %s, not %s", claim.Critical.Image.Digest, digest)
	}
	return nil
}
