package source_test

import (
	"encoding/hex"
	"encoding/json"
	"testing"
	"time"

	protobundle "github.com/sigstore/protobuf-specs/gen/pb-go/bundle/v1"
	protocommon "github.com/sigstore/protobuf-specs/gen/pb-go/common/v1"
	protorekor "github.com/sigstore/protobuf-specs/gen/pb-go/rekor/v1"
	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/testing/ca"
	"github.com/sigstore/sigstore-go/pkg/tlog"
	"github.com/sigstore/sigstore/pkg/cryptoutils"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/source"
)

func newSigstore(t *testing.T) *ca.VirtualSigstore {
	t.Helper()
	sigstore, err := ca.NewVirtualSigstore()
	if err != nil {
		t.Fatal(err)
	}
	return sigstore
}

// trustRoot returns the trusted_root.json of a private Sigstore. Its certificates are in no transparency log.
func trustRoot(t *testing.T, sigstore root.TrustedMaterial, ctLogs map[string]*root.TransparencyLog) []byte {
	t.Helper()
	logs := sigstore.RekorLogs()
	for _, known := range []map[string]*root.TransparencyLog{logs, ctLogs} {
		for id, entry := range known {
			raw, err := hex.DecodeString(id) // the virtual Sigstore has the hexadecimal ID here
			if err != nil {
				t.Fatal(err)
			}
			entry.ID = raw
		}
	}
	trusted, err := root.NewTrustedRoot(root.TrustedRootMediaType01,
		sigstore.FulcioCertificateAuthorities(), ctLogs, sigstore.TimestampingAuthorities(), logs)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := trusted.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// logEntry returns the log entry of a signature with its inclusion promise.
func logEntry(t *testing.T, sigstore *ca.VirtualSigstore, entity *ca.TestEntity) *protorekor.TransparencyLogEntry {
	t.Helper()
	entries, err := entity.TlogEntries()
	if err != nil {
		t.Fatal(err)
	}
	entry := entries[0].TransparencyLogEntry()
	var kind struct{ Kind, APIVersion string }
	if err := json.Unmarshal(entry.GetCanonicalizedBody(), &kind); err != nil {
		t.Fatal(err)
	}
	promise, err := sigstore.RekorSignPayload(tlog.RekorPayload{
		Body: entry.GetCanonicalizedBody(), IntegratedTime: entry.GetIntegratedTime(), LogIndex: entry.GetLogIndex(),
		LogID: hex.EncodeToString(entry.GetLogId().GetKeyId()),
	})
	if err != nil {
		t.Fatal(err)
	}
	entry.KindVersion = &protorekor.KindVersion{Kind: kind.Kind, Version: kind.APIVersion}
	entry.InclusionPromise = &protorekor.InclusionPromise{SignedEntryTimestamp: promise}
	return entry
}

// classicKeyless returns a keyless signature like cosign sign of version 2.
func classicKeyless(t *testing.T, sigstore *ca.VirtualSigstore, digest string) blob {
	t.Helper()
	text := payload(digest)
	entity, err := sigstore.SignWithVersion(identity, issuer, text, "v0.1")
	if err != nil {
		t.Fatal(err)
	}
	content, err := entity.SignatureContent()
	if err != nil {
		t.Fatal(err)
	}
	verification, err := entity.VerificationContent()
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := cryptoutils.MarshalCertificateToPEM(verification.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	logged := logEntry(t, sigstore, entity)
	entry, err := json.Marshal(map[string]any{
		"SignedEntryTimestamp": logged.GetInclusionPromise().GetSignedEntryTimestamp(),
		"Payload": map[string]any{
			"body": logged.GetCanonicalizedBody(), "integratedTime": logged.GetIntegratedTime(), "logIndex": logged.GetLogIndex(),
			"logID": hex.EncodeToString(logged.GetLogId().GetKeyId()),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	signed := classicSignature(text, content.Signature())
	signed.annotations["dev.sigstore.cosign/certificate"] = string(certificate)
	signed.annotations["dev.sigstore.cosign/bundle"] = string(entry)
	return signed
}

// bundleKeyless returns a keyless bundle like cosign sign of version 3.
func bundleKeyless(t *testing.T, sigstore *ca.VirtualSigstore, digest string) []byte {
	t.Helper()
	text := statement(digest, signStatement)
	entity, err := sigstore.AttestAtTime(identity, issuer, text, time.Now().Add(5*time.Minute), true)
	if err != nil {
		t.Fatal(err)
	}
	content, err := entity.SignatureContent()
	if err != nil {
		t.Fatal(err)
	}
	verification, err := entity.VerificationContent()
	if err != nil {
		t.Fatal(err)
	}
	material := &protobundle.VerificationMaterial{
		Content: &protobundle.VerificationMaterial_Certificate{
			Certificate: &protocommon.X509Certificate{RawBytes: verification.Certificate().Raw},
		},
		TlogEntries: []*protorekor.TransparencyLogEntry{logEntry(t, sigstore, entity)},
	}
	return encode(t, &protobundle.Bundle{VerificationMaterial: material, Content: envelope(text, content.Signature())})
}

func TestKeylessSignaturesAreVerified(t *testing.T) {
	t.Parallel()
	sigstore, other := newSigstore(t), newSigstore(t)
	trusted := trustRoot(t, sigstore, nil)
	match := func(issuer, subject string) configv1beta1.OIDCIdentityMatch {
		return configv1beta1.OIDCIdentityMatch{Issuer: issuer, Subject: subject}
	}
	exact := match(`^https://issuer\.example\.com$`, `^https://example\.com/charts/.*$`)
	for name, test := range map[string]struct {
		identities []configv1beta1.OIDCIdentityMatch
		root       []byte
		want       string
	}{
		"the identity":        {identities: []configv1beta1.OIDCIdentityMatch{exact}, root: trusted},
		"one of several":      {identities: []configv1beta1.OIDCIdentityMatch{match("github", "nobody"), exact}, root: trusted},
		"part of the text":    {identities: []configv1beta1.OIDCIdentityMatch{match("issuer", "release.yaml@refs/tags/v")}, root: trusted},
		"another subject":     {identities: []configv1beta1.OIDCIdentityMatch{match("issuer", "^nobody$")}, root: trusted, want: "^nobody$"},
		"another issuer":      {identities: []configv1beta1.OIDCIdentityMatch{match("^github$", ".*")}, root: trusted, want: "^github$"},
		"no identity":         {root: trusted, want: "at least one identity"},
		"another trust root":  {identities: []configv1beta1.OIDCIdentityMatch{exact}, root: trustRoot(t, other, nil), want: "not valid"},
		"unlogged authority":  {identities: []configv1beta1.OIDCIdentityMatch{exact}, root: trustRoot(t, sigstore, sigstore.CTLogs()), want: "timestamp"},
		"garbage trust root":  {identities: []configv1beta1.OIDCIdentityMatch{exact}, root: []byte("garbage"), want: "key trusted_root.json: "},
		"trust root of no CA": {identities: []configv1beta1.OIDCIdentityMatch{exact}, root: []byte(`{"mediaType":"` + root.TrustedRootMediaType01 + `"}`), want: "not valid"},
	} {
		for layout, attach := range map[string]func(t *testing.T, c signedChart){
			"classic": func(t *testing.T, c signedChart) {
				t.Helper()
				c.attachClassic(t, classicKeyless(t, sigstore, c.manifest.Digest.String()))
			},
			"bundle": func(t *testing.T, c signedChart) {
				t.Helper()
				c.attachBundle(t, bundleKeyless(t, sigstore, c.manifest.Digest.String()))
			},
		} {
			t.Run(name+" "+layout, func(t *testing.T) {
				t.Parallel()
				chart := newSignedChart(t)
				attach(t, chart)
				err := chart.fetch(t, newCharts(t, t.TempDir()), source.SignatureRequirement{Identities: test.identities, TrustRoot: test.root})
				wantVerified(t, err, chart, test.want)
			})
		}
	}
	for name, attach := range map[string]func(c signedChart){
		"without a log entry": func(c signedChart) {
			signed := classicKeyless(t, sigstore, c.manifest.Digest.String())
			delete(signed.annotations, "dev.sigstore.cosign/bundle")
			c.attachClassic(t, signed)
		},
		"by a key": func(c signedChart) { c.attachClassic(t, classicByKey(t, ecdsaKey(t), c.manifest.Digest.String())) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chart := newSignedChart(t)
			attach(chart)
			err := chart.fetch(t, newCharts(t, t.TempDir()), source.SignatureRequirement{Identities: []configv1beta1.OIDCIdentityMatch{exact}, TrustRoot: trusted})
			wantVerified(t, err, chart, "its cosign signature is not valid: ")
		})
	}
	t.Run("certificate where a key is demanded", func(t *testing.T) {
		t.Parallel()
		chart := newSignedChart(t)
		chart.attachClassic(t, classicKeyless(t, sigstore, chart.manifest.Digest.String()))
		err := chart.fetch(t, newCharts(t, t.TempDir()), source.SignatureRequirement{PublicKey: publicPEM(t, ecdsaKey(t))})
		wantVerified(t, err, chart, "expected key signature, not certificate")
	})
}
