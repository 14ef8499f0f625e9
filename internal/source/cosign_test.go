package source_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	protobundle "github.com/sigstore/protobuf-specs/gen/pb-go/bundle/v1"
	protocommon "github.com/sigstore/protobuf-specs/gen/pb-go/common/v1"
	protodsse "github.com/sigstore/protobuf-specs/gen/pb-go/dsse"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	"google.golang.org/protobuf/encoding/protojson"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/source"
)

const (
	bundleMediaType = "application/vnd.dev.sigstore.bundle.v0.3+json"
	issuer          = "https://issuer.example.com"
	identity        = "https://example.com/charts/release.yaml@refs/tags/v0.1.0"
)

// signedChart is the chart hello 0.1.0 in a registry. The test signs it.
type signedChart struct {
	address  string // oci:// URL of the charts
	name     string // of the chart in the registry, without scheme
	manifest ocispec.Descriptor
	server   *countingServer
}

func newSignedChart(t *testing.T, options ...registry.Option) signedChart {
	t.Helper()
	handler := newCountingServer(registry.New(append(options, registry.Logger(log.New(io.Discard, "", 0)))...))
	host := strings.TrimPrefix(serve(t, handler), "http://")
	archive := exampleArchive(t, examples.Chart{Version: "0.1.0"})
	name := host + "/charts/hello"
	return signedChart{
		address: "oci://" + host + "/charts", name: name, server: handler,
		manifest: push(t, name+":0.1.0", archive, chartMediaType),
	}
}

// attachClassic writes signatures like cosign sign of version 2.
func (c signedChart) attachClassic(t *testing.T, signatures ...blob) {
	t.Helper()
	pushArtifact(t, c.name+":"+strings.Replace(c.manifest.Digest.String(), ":", "-", 1)+".sig", nil, signatures...)
}

// attachBundle writes a Sigstore bundle like cosign sign of version 3.
func (c signedChart) attachBundle(t *testing.T, bundle []byte) {
	t.Helper()
	pushArtifact(t, c.name, &c.manifest, blob{mediaType: bundleMediaType, content: bundle})
}

// fetch fetches the chart with another spec in each call, so the result of a former failure is not used.
func (c signedChart) fetch(t *testing.T, charts *source.Charts, wanted source.SignatureRequirement) error {
	t.Helper()
	return awaitResponse(func() error {
		_, err := charts.Fetch(t.Context(), helmChart(c.address, "repo/hello", "0.1.0"), source.Login{PlainHTTP: true},
			source.Verification{Signature: &wanted}, rand.Text)
		return err
	})
}

// payload returns the payload that cosign of version 2 signs.
func payload(digest string) []byte {
	return fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":"charts/hello"},"image":{"docker-manifest-digest":%q},`+
		`"type":"cosign container image signature"},"optional":null}`, digest)
}

// statement returns the statement that cosign of version 3 signs.
func statement(digest, kind string) []byte {
	return fmt.Appendf(nil, `{"_type":"https://in-toto.io/Statement/v1","subject":[{"digest":{"sha256":%q}}],"predicateType":%q,"predicate":{}}`,
		strings.TrimPrefix(digest, "sha256:"), kind)
}

const signStatement = "https://sigstore.dev/cosign/sign/v1"

func ecdsaKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func publicPEM(t *testing.T, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	raw, err := cryptoutils.MarshalPublicKeyToPEM(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func signMessage(t *testing.T, key *ecdsa.PrivateKey, message []byte) []byte {
	t.Helper()
	signer, err := signature.LoadECDSASigner(key, crypto.SHA256)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := signer.SignMessage(bytes.NewReader(message))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func classicSignature(payload, raw []byte) blob {
	return blob{
		mediaType: "application/vnd.dev.cosign.simplesigning.v1+json", content: payload,
		annotations: map[string]string{"dev.cosignproject.cosign/signature": base64.StdEncoding.EncodeToString(raw)},
	}
}

func classicByKey(t *testing.T, key *ecdsa.PrivateKey, digest string) blob {
	t.Helper()
	text := payload(digest)
	return classicSignature(text, signMessage(t, key, text))
}

func envelope(statement, raw []byte) *protobundle.Bundle_DsseEnvelope {
	return &protobundle.Bundle_DsseEnvelope{DsseEnvelope: &protodsse.Envelope{
		Payload: statement, PayloadType: "application/vnd.in-toto+json", Signatures: []*protodsse.Signature{{Sig: raw}},
	}}
}

func encode(t *testing.T, bundle *protobundle.Bundle) []byte {
	t.Helper()
	bundle.MediaType = bundleMediaType
	raw, err := protojson.Marshal(bundle)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func bundleByKey(t *testing.T, key *ecdsa.PrivateKey, statement []byte) []byte {
	t.Helper()
	return encode(t, &protobundle.Bundle{
		VerificationMaterial: &protobundle.VerificationMaterial{
			Content: &protobundle.VerificationMaterial_PublicKey{PublicKey: &protocommon.PublicKeyIdentifier{Hint: "any"}},
		},
		Content: envelope(statement, signMessage(t, key, dsse.PAE("application/vnd.in-toto+json", statement))),
	})
}

func TestSignaturesByKeyAreVerified(t *testing.T) {
	t.Parallel()
	key, other := ecdsaKey(t), ecdsaKey(t)
	elsewhere := "sha256:" + strings.Repeat("a", 64)
	for name, test := range map[string]struct {
		attach func(t *testing.T, c signedChart)
		key    []byte
		want   string
	}{
		"good classic signature": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachClassic(t, classicByKey(t, key, c.manifest.Digest.String()))
		}},
		"good signature beside a foreign one": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			digest := c.manifest.Digest.String()
			c.attachClassic(t, classicByKey(t, other, digest), classicByKey(t, key, digest))
		}},
		"good bundle": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachBundle(t, bundleByKey(t, key, statement(c.manifest.Digest.String(), signStatement)))
		}},
		"good bundle beside a foreign classic signature": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachClassic(t, classicByKey(t, other, c.manifest.Digest.String()))
			c.attachBundle(t, bundleByKey(t, key, statement(c.manifest.Digest.String(), signStatement)))
		}},
		"good bundle beside large ones": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			large := bytes.Repeat([]byte(" "), 2<<20)
			c.attachBundle(t, large)
			c.attachClassic(t, classicSignature(large, []byte("x")))
			c.attachBundle(t, bundleByKey(t, key, statement(c.manifest.Digest.String(), signStatement)))
		}},
		"bundle without a signature": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			text := statement(c.manifest.Digest.String(), signStatement)
			c.attachBundle(t, encode(t, &protobundle.Bundle{
				VerificationMaterial: &protobundle.VerificationMaterial{
					Content: &protobundle.VerificationMaterial_PublicKey{PublicKey: &protocommon.PublicKeyIdentifier{}},
				},
				Content: &protobundle.Bundle_DsseEnvelope{DsseEnvelope: &protodsse.Envelope{
					Payload: text, PayloadType: "application/vnd.in-toto+json",
				}},
			}))
		}, want: "its cosign signature is not valid"},
		"bundle of nothing": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachBundle(t, encode(t, &protobundle.Bundle{}))
		}, want: "its cosign signature is not valid"},
		"missing signature": {attach: func(*testing.T, signedChart) {}, want: "signatureVerification: the chart has no cosign signature"},
		"wrong key": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachClassic(t, classicByKey(t, other, c.manifest.Digest.String()))
		}, want: "its cosign signature is not valid: failed to verify signature"},
		"wrong keys": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachClassic(t, classicByKey(t, other, c.manifest.Digest.String()))
			c.attachBundle(t, bundleByKey(t, other, statement(c.manifest.Digest.String(), signStatement)))
		}, want: "none of its 2 cosign signatures is valid, the last one because: failed to verify signature"},
		"another chart's classic signature": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachClassic(t, classicByKey(t, key, elsewhere))
		}, want: "it signs another artifact, not sha256:"},
		"another chart's bundle": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachBundle(t, bundleByKey(t, key, statement(elsewhere, signStatement)))
		}, want: "provided artifact digest does not match"},
		"changed text": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachClassic(t, classicSignature(payload(c.manifest.Digest.String()), signMessage(t, key, payload(elsewhere))))
		}, want: "failed to verify signature"},
		"text of another type": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			text := bytes.Replace(payload(c.manifest.Digest.String()), []byte("container image"), []byte("other"), 1)
			c.attachClassic(t, classicSignature(text, signMessage(t, key, text)))
		}, want: "the signed text is not of the type of cosign's signatures"},
		"statement that is no signature": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachBundle(t, bundleByKey(t, key, statement(c.manifest.Digest.String(), "https://slsa.dev/provenance/v1")))
		}, want: "it is no signature but a statement of another type"},
		"garbage signature": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachClassic(t, classicSignature(payload(c.manifest.Digest.String()), nil))
		}, want: "is not a signature in base64"},
		"garbage bundle": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachBundle(t, []byte("garbage"))
		}, want: "its cosign signature is not valid"},
		"garbage key": {attach: func(t *testing.T, c signedChart) {
			t.Helper()
			c.attachClassic(t, classicByKey(t, key, c.manifest.Digest.String()))
		}, key: []byte("garbage"), want: "key cosign.pub is not a public key in PEM"},
	} {
		for layout, options := range map[string][]registry.Option{
			"with the referrers API": {registry.WithReferrersSupport(true)}, "without it": nil,
		} {
			t.Run(name+" "+layout, func(t *testing.T) {
				t.Parallel()
				chart := newSignedChart(t, options...)
				test.attach(t, chart)
				wanted := source.SignatureRequirement{PublicKey: publicPEM(t, key)}
				if test.key != nil {
					wanted.PublicKey = test.key
				}
				wantVerified(t, chart.fetch(t, newCharts(t, t.TempDir()), wanted), chart, test.want)
			})
		}
	}
}

// wantVerified checks that err is nil if want is empty. Otherwise err must contain the chart, the repository and want.
func wantVerified(t *testing.T, err error, chart signedChart, want string) {
	t.Helper()
	if want == "" {
		if err != nil {
			t.Error(err)
		}
		return
	}
	wantInvalid(t, err)
	wantTexts(t, err, "chart repo/hello 0.1.0 in "+chart.address+": ", want)
}

// The hub does not download artifacts that cosign marks as attestations, because they may be many and large.
func TestAttestationsAreIgnored(t *testing.T) {
	t.Parallel()
	key, chart := ecdsaKey(t), newSignedChart(t)
	kind := "https://spdx.dev/Document"
	attestation := pushArtifact(t, chart.name, &chart.manifest, blob{
		mediaType: bundleMediaType, content: bundleByKey(t, key, statement(chart.manifest.Digest.String(), kind)),
		annotations: map[string]string{"dev.sigstore.bundle.predicateType": kind},
	})
	path := "/v2/charts/hello/manifests/" + attestation.Digest.String()
	before := chart.server.countRequests(path)
	err := chart.fetch(t, newCharts(t, t.TempDir()), source.SignatureRequirement{PublicKey: publicPEM(t, key)})
	wantVerified(t, err, chart, "the chart has no cosign signature")
	if got := chart.server.countRequests(path); got != before {
		t.Error("the attestation was downloaded")
	}
}

// A signature is for one manifest. A tag that was moved to another manifest has no signature.
func TestSignatureOfATagThatWasMoved(t *testing.T) {
	t.Parallel()
	key, chart := ecdsaKey(t), newSignedChart(t)
	chart.attachClassic(t, classicByKey(t, key, chart.manifest.Digest.String()))
	push(t, chart.name+":0.1.0", exampleArchive(t, examples.Chart{Version: "0.1.0", AppVersion: "evil"}), chartMediaType)
	charts, wanted := newCharts(t, t.TempDir()), source.SignatureRequirement{PublicKey: publicPEM(t, key)}
	wantVerified(t, chart.fetch(t, charts, wanted), chart, "the chart has no cosign signature")

	// The signed chart is not accepted with another tag.
	signed := newSignedChart(t)
	signed.attachClassic(t, classicByKey(t, key, signed.manifest.Digest.String()))
	archive := exampleArchive(t, examples.Chart{Version: "0.1.0"})
	push(t, signed.name+":0.2.0", archive, chartMediaType)
	_, err := charts.Fetch(t.Context(), helmChart(signed.address, "hello", "0.2.0"), source.Login{PlainHTTP: true}, source.Verification{Signature: &wanted}, nil)
	wantInvalid(t, err)
	wantTexts(t, err, "the archive contains chart hello 0.1.0")
}

func TestSignatureIsVerifiedOnceForAKey(t *testing.T) {
	t.Parallel()
	key, chart := ecdsaKey(t), newSignedChart(t)
	clock, dir := clocktesting.NewFakePassiveClock(time.Unix(0, 0)), t.TempDir()
	charts, err := source.NewCharts(dir, clock)
	if err != nil {
		t.Fatal(err)
	}
	wanted := source.SignatureRequirement{PublicKey: publicPEM(t, key)}
	login := source.Login{PlainHTTP: true}
	if _, err := charts.Fetch(t.Context(), helmChart(chart.address, "hello", "0.1.0"), login, source.Verification{}, nil); err != nil {
		t.Fatal(err)
	}
	wantVerified(t, chart.fetch(t, charts, wanted), chart, "the chart has no cosign signature")
	chart.attachClassic(t, classicByKey(t, key, chart.manifest.Digest.String()))
	clock.SetTime(time.Unix(61, 0))
	wantVerified(t, chart.fetch(t, charts, wanted), chart, "")
	other := source.SignatureRequirement{PublicKey: publicPEM(t, ecdsaKey(t))}
	wantVerified(t, chart.fetch(t, charts, other), chart, "its cosign signature is not valid")
	chart.server.setHandler(http.NotFoundHandler())
	wantVerified(t, chart.fetch(t, newCharts(t, dir), wanted), chart, "")
	if err := chart.fetch(t, newCharts(t, dir), other); err == nil {
		t.Error("a chart is accepted for a key that did not sign it")
	}
}

func TestSignatureNeedsARegistry(t *testing.T) {
	t.Parallel()
	address := serve(t, exampleRepository(t))
	_, err := newCharts(t, t.TempDir()).Fetch(t.Context(), helmChart(address, "repo/hello", "0.1.0"), source.Login{},
		source.Verification{Signature: &source.SignatureRequirement{PublicKey: publicPEM(t, ecdsaKey(t))}}, nil)
	wantInvalid(t, err)
	wantTexts(t, err, "chart repo/hello 0.1.0 in "+address+": signatureVerification: cosign signs charts in OCI registries (oci://) only")
}

func TestRegistryFailureIsNoMissingSignature(t *testing.T) {
	t.Parallel()
	key, chart := ecdsaKey(t), newSignedChart(t)
	chart.attachClassic(t, classicByKey(t, key, chart.manifest.Digest.String()))
	working := chart.server.handler
	chart.server.setHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, ".sig") {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		working.ServeHTTP(w, r)
	}))
	charts, wanted := newCharts(t, t.TempDir()), source.SignatureRequirement{PublicKey: publicPEM(t, key)}
	err := chart.fetch(t, charts, wanted)
	wantTexts(t, err, "503")
	if errors.Is(err, source.ErrUnverified) {
		t.Errorf("got %v, want an error about the connection to the registry", err)
	}
	chart.server.setHandler(working)
	wantVerified(t, chart.fetch(t, charts, wanted), chart, "")
}
