package source

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path"

	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// ErrUnverified is wrapped by every error about a chart with a missing or invalid signature. Such an error is also
// phase.TerminalError.
var ErrUnverified = errors.New("not verified")

// The keys of the Secrets that a verification reads.
const (
	keyKeyring   = "keyring.gpg"
	keyPublicKey = "cosign.pub"
	keyTrustRoot = "trusted_root.json"
)

// Verification describes the signatures that a chart must have. The zero Verification requires none.
type Verification struct {
	// Keyring holds OpenPGP public keys. One of them must have signed the chart's provenance file. If it is nil, no
	// provenance file is required.
	Keyring []byte
	// Signature describes the required cosign signature. If it is nil, none is required.
	Signature *SignatureRequirement
}

// SignatureRequirement describes the cosign signature that a chart must have: by PublicKey, or by one of Identities.
type SignatureRequirement struct {
	// PublicKey is in PEM. If it is nil, the signature must have a certificate for one of Identities.
	PublicKey []byte
	// Identities are the accepted identities. Issuer and subject are regular expressions.
	Identities []configv1beta1.OIDCIdentityMatch
	// TrustRoot is a trusted_root.json of Sigstore, for the verification of certificates. Nil means the trust root of
	// Sigstore's public services.
	TrustRoot []byte
}

// VerificationSecrets lists the Secrets that VerificationFor reads for a chart.
func VerificationSecrets(chart configv1beta1.HelmChart) []corev1.SecretReference {
	var refs []corev1.SecretReference
	if wanted := chart.ProvenanceVerification; wanted != nil && wanted.KeyringSecretRef != nil {
		refs = append(refs, *wanted.KeyringSecretRef)
	}
	if wanted := chart.SignatureVerification; wanted != nil && wanted.SecretRef != nil {
		refs = append(refs, *wanted.SecretRef)
	}
	return refs
}

// VerificationFor returns the Verification of an expanded chart, with the keys from the Secrets on the hub that the
// chart refers to. The namespace of a Secret defaults to the cluster's. It fails with ErrNotFound if a Secret is
// missing, and with phase.TerminalError if a Secret lacks the key, if the template context may not read it, or if a
// field is not valid.
func VerificationFor(
	ctx context.Context, hub client.Reader, chart configv1beta1.HelmChart, tmplCtx TemplateContext,
) (Verification, error) {
	var verification Verification
	if wanted := chart.ProvenanceVerification; wanted != nil {
		keyring, err := readKey(ctx, hub, wanted.KeyringSecretRef, keyKeyring, tmplCtx)
		if err != nil {
			return Verification{}, fmt.Errorf("provenanceVerification.keyringSecretRef: %w", err)
		}
		verification.Keyring = keyring
	}
	if wanted := chart.SignatureVerification; wanted != nil {
		signature, err := signatureFor(ctx, hub, *wanted, tmplCtx)
		if err != nil {
			return Verification{}, fmt.Errorf("signatureVerification%w", err)
		}
		verification.Signature = signature
	}
	return verification, nil
}

// signatureFor returns the SignatureRequirement of a chart. Its errors begin with ".<field>: ": the caller puts
// signatureVerification before them.
func signatureFor(
	ctx context.Context, hub client.Reader, wanted configv1beta1.SignatureVerification, tmplCtx TemplateContext,
) (*SignatureRequirement, error) {
	if wanted.Provider == configv1beta1.SignatureProviderPublicKey {
		key, err := readKey(ctx, hub, wanted.SecretRef, keyPublicKey, tmplCtx)
		if err != nil {
			return nil, fmt.Errorf(".secretRef: %w", err)
		}
		return &SignatureRequirement{PublicKey: key}, nil
	}
	if wanted.Provider != configv1beta1.SignatureProviderKeyless {
		return nil, phase.TerminalErrorf(".provider: %q is neither PublicKey nor Keyless", wanted.Provider)
	}
	signature := &SignatureRequirement{}
	if wanted.SecretRef != nil {
		root, err := readKey(ctx, hub, wanted.SecretRef, keyTrustRoot, tmplCtx)
		if err != nil {
			return nil, fmt.Errorf(".secretRef: %w", err)
		}
		signature.TrustRoot = root
	}
	if len(wanted.MatchOIDCIdentity) == 0 {
		// Everybody can get a certificate of the public Sigstore: a signature of any identity proves nothing.
		return nil, phase.TerminalErrorf(".matchOIDCIdentity: provider Keyless needs at least one identity")
	}
	for i, match := range wanted.MatchOIDCIdentity {
		expanded, err := expandIdentity(match, tmplCtx)
		if err != nil {
			return nil, fmt.Errorf(".matchOIDCIdentity[%d].%w", i, err)
		}
		signature.Identities = append(signature.Identities, expanded)
	}
	return signature, nil
}

// expandIdentity expands the templates in an identity. It fails with phase.TerminalError if the result is empty or no
// regular expression.
func expandIdentity(match configv1beta1.OIDCIdentityMatch, tmplCtx TemplateContext) (configv1beta1.OIDCIdentityMatch, error) {
	for _, field := range []struct {
		name string
		text *string
	}{{"issuer", &match.Issuer}, {"subject", &match.Subject}} {
		expanded, err := tmplCtx.Expand(field.name, *field.text)
		if err != nil {
			return configv1beta1.OIDCIdentityMatch{}, fmt.Errorf("%s: %w", field.name, err)
		}
		if expanded == "" {
			return configv1beta1.OIDCIdentityMatch{}, phase.TerminalErrorf("%s: is empty", field.name)
		}
		if _, err := kube.CompilePattern(expanded); err != nil {
			return configv1beta1.OIDCIdentityMatch{}, phase.TerminalErrorf("%s: %w", field.name, err)
		}
		*field.text = expanded
	}
	return match, nil
}

// readKey returns the value of key in the Secret of ref. It fails like VerificationFor.
func readKey(
	ctx context.Context, hub client.Reader, ref *corev1.SecretReference, key string, tmplCtx TemplateContext,
) ([]byte, error) {
	if ref == nil {
		return nil, phase.TerminalErrorf("it must name a Secret with the key %s", key)
	}
	secret, err := readSecret(ctx, hub, *ref, tmplCtx)
	if err != nil {
		return nil, err
	}
	if len(secret.Data[key]) == 0 {
		return nil, phase.TerminalErrorf("Secret %s/%s has no key %s", secret.Namespace, secret.Name, key)
	}
	return secret.Data[key], nil
}

func (v Verification) isZero() bool { return v.Keyring == nil && v.Signature == nil }

// digest identifies the verification in the cache key of a chart.
func (v Verification) digest() string {
	raw, _ := json.Marshal(v) // strings and bytes always have a JSON form
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// downloadedChart is an archive before its verification. A packaged chart has no location.
type downloadedChart struct {
	at       location
	archive  []byte
	metadata *helmchart.Metadata
}

// verify returns nil if the downloaded archive is the requested chart and has all signatures that the request requires.
func (c *Charts) verify(ctx context.Context, repo repository, request chartRequest, got downloadedChart) error {
	verification := request.verification
	if verification.isZero() {
		return nil
	}
	// A signature covers the archive, but not the name and version under which the repository lists it.
	if got.metadata.Name != path.Base(request.name) || tagOf(got.metadata.Version) != tagOf(got.at.version) {
		return unverified("the archive contains chart %s %s", got.metadata.Name, got.metadata.Version)
	}
	if verification.Keyring != nil {
		if err := verifyProvenance(ctx, repo, verification.Keyring, got); err != nil {
			return fmt.Errorf("provenanceVerification: %w", err)
		}
	}
	if verification.Signature != nil {
		if err := c.verifySignature(ctx, repo, *verification.Signature, got.at); err != nil {
			return fmt.Errorf("signatureVerification: %w", err)
		}
	}
	return nil
}

// unverified returns an error that is ErrUnverified and phase.TerminalError.
func unverified(format string, args ...any) error {
	return phase.TerminalError{Err: unverifiedError{fmt.Errorf(format, args...)}}
}

// unverifiedError is ErrUnverified for errors.Is, but has its own message.
type unverifiedError struct{ error }

func (unverifiedError) Is(target error) bool { return target == ErrUnverified }

// oneLine returns the message of err on one line.
func oneLine(err error) string { return kube.OneLine(err.Error()) }
