package source

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"

	godigest "github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	protobundle "github.com/sigstore/protobuf-specs/gen/pb-go/bundle/v1"
	protocommon "github.com/sigstore/protobuf-specs/gen/pb-go/common/v1"
	protorekor "github.com/sigstore/protobuf-specs/gen/pb-go/rekor/v1"
	"github.com/sigstore/sigstore-go/pkg/bundle"
	"oras.land/oras-go/v2/registry/remote"
)

const (
	// maxSignatures limits the signatures of one artifact that are verified in each layout.
	maxSignatures = 50
	// maxSignatureBytes limits one signature with its certificate and log entry. They need a few KiB.
	maxSignatureBytes = 1 << 20

	legacyMediaType = "application/vnd.dev.cosign.simplesigning.v1+json"
	bundleMediaType = "application/vnd.dev.sigstore.bundle"

	annotationSignature   = "dev.cosignproject.cosign/signature"
	annotationCertificate = "dev.sigstore.cosign/certificate"
	annotationLogEntry    = "dev.sigstore.cosign/bundle"
	annotationPredicate   = "dev.sigstore.bundle.predicateType"
	annotationTimestamp   = "dev.sigstore.cosign/rfc3161timestamp"
)

// legacySignatures reads the manifest with the tag sha256-<digest>.sig. It has a layer for each signature: the blob is
// the signed text, and the annotations have the signature.
func (r *ociRegistry) legacySignatures(
	ctx context.Context, at location,
) (found []cosignSignature, unreadable []error, err error) {
	opened, err := r.openRepository(at.url)
	if err != nil {
		return nil, nil, err
	}
	manifest, err := readManifest(ctx, opened, strings.ReplaceAll(at.digest, ":", "-")+".sig")
	if errors.Is(err, ErrNotFound) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	for _, layer := range manifest.Layers[:min(len(manifest.Layers), maxSignatures)] {
		if layer.MediaType != legacyMediaType {
			continue
		}
		if layer.Size > maxSignatureBytes {
			unreadable = append(unreadable, fmt.Errorf("it has more than %d MiB", maxSignatureBytes>>20))
			continue
		}
		payload, err := fetchBlob(ctx, opened, layer, maxSignatureBytes)
		if err != nil {
			return nil, nil, fmt.Errorf("read a signature of %s: %w", opened.Reference.Repository, err)
		}
		signed, err := legacyBundle(payload, layer.Annotations)
		if err != nil {
			unreadable = append(unreadable, err)
			continue
		}
		found = append(found, cosignSignature{bundle: signed, payload: payload})
	}
	return found, unreadable, nil
}

// bundleSignatures reads the Sigstore bundles that refer to the artifact, with the referrers API of OCI 1.1 or its
// fallback tag.
func (r *ociRegistry) bundleSignatures(
	ctx context.Context, at location,
) (found []cosignSignature, unreadable []error, err error) {
	opened, err := r.openRepository(at.url)
	if err != nil {
		return nil, nil, err
	}
	referrers, err := listSignatureReferrers(ctx, opened, at.digest)
	if err != nil {
		return nil, nil, err
	}
	for _, referrer := range referrers {
		if referrer.Digest.Validate() != nil { // errors about the manifest name it
			unreadable = append(unreadable, errors.New("the digest of a signature is not valid"))
			continue
		}
		manifest, err := readManifest(ctx, opened, referrer.Digest.String())
		if err != nil {
			return nil, nil, err
		}
		index := slices.IndexFunc(manifest.Layers, func(l ocispec.Descriptor) bool {
			return strings.HasPrefix(l.MediaType, bundleMediaType)
		})
		if index < 0 {
			continue
		}
		layer := manifest.Layers[index]
		if layer.Size > maxSignatureBytes {
			unreadable = append(unreadable, fmt.Errorf("it has more than %d MiB", maxSignatureBytes>>20))
			continue
		}
		raw, err := fetchBlob(ctx, opened, layer, maxSignatureBytes)
		if err != nil {
			return nil, nil, fmt.Errorf("read a signature of %s: %w", opened.Reference.Repository, err)
		}
		signed, err := parseBundle(raw)
		if err != nil {
			unreadable = append(unreadable, err)
			continue
		}
		found = append(found, cosignSignature{bundle: signed})
	}
	return found, unreadable, nil
}

// parseBundle parses a Sigstore bundle. Its error has no text of the bundle.
func parseBundle(raw []byte) (*bundle.Bundle, error) {
	signed := &bundle.Bundle{}
	if err := signed.UnmarshalJSON(raw); err != nil {
		return nil, errors.New("it is not a valid Sigstore bundle")
	}
	return signed, nil
}

// listSignatureReferrers returns the artifacts that refer to the artifact with the digest and can hold a signature.
func listSignatureReferrers(
	ctx context.Context, opened *remote.Repository, digest string,
) ([]ocispec.Descriptor, error) {
	var referrers []ocispec.Descriptor
	subject := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: godigest.Digest(digest)}
	err := opened.Referrers(ctx, subject, "", func(page []ocispec.Descriptor) error {
		for _, referrer := range page {
			if canBeSignature(referrer) && len(referrers) < maxSignatures {
				referrers = append(referrers, referrer)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the signatures of %s: %w", opened.Reference.Repository, registryError(err))
	}
	return referrers, nil
}

// canBeSignature returns whether an artifact can be a Sigstore bundle with a signature. Some registries report the
// media type of the artifact's configuration as its artifact type, so an empty configuration is accepted, too.
// Attestations, which can be large, have an annotation of cosign and are refused.
func canBeSignature(referrer ocispec.Descriptor) bool {
	if predicate, ok := referrer.Annotations[annotationPredicate]; ok && predicate != signStatement {
		return false
	}
	return strings.HasPrefix(referrer.ArtifactType, bundleMediaType) ||
		slices.Contains([]string{"", ocispec.MediaTypeEmptyJSON}, referrer.ArtifactType)
}

// legacyBundle converts a legacy signature to a Sigstore bundle, so that both layouts are verified by the same code.
func legacyBundle(payload []byte, annotations map[string]string) (*bundle.Bundle, error) {
	raw, err := base64.StdEncoding.DecodeString(annotations[annotationSignature])
	if err != nil || len(raw) == 0 {
		return nil, fmt.Errorf("annotation %s is not a signature in base64", annotationSignature)
	}
	material, err := legacyMaterial(annotations)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(payload)
	return bundle.NewBundle(&protobundle.Bundle{
		MediaType:            "application/vnd.dev.sigstore.bundle+json;version=0.1",
		VerificationMaterial: material,
		Content: &protobundle.Bundle_MessageSignature{MessageSignature: &protocommon.MessageSignature{
			MessageDigest: &protocommon.HashOutput{Algorithm: protocommon.HashAlgorithm_SHA2_256, Digest: sum[:]},
			Signature:     raw,
		}},
	})
}

// legacyMaterial reads the verification material of a legacy signature from the annotations of its layer: certificate,
// log entry and timestamp, each of them optional.
func legacyMaterial(annotations map[string]string) (*protobundle.VerificationMaterial, error) {
	material := &protobundle.VerificationMaterial{
		Content: &protobundle.VerificationMaterial_PublicKey{PublicKey: &protocommon.PublicKeyIdentifier{}},
	}
	certificate, hasCertificate := annotations[annotationCertificate]
	if !hasCertificate {
		return material, nil
	}
	block, _ := pem.Decode([]byte(certificate))
	if block == nil {
		return nil, fmt.Errorf("annotation %s is not PEM", annotationCertificate)
	}
	chain := &protocommon.X509CertificateChain{
		Certificates: []*protocommon.X509Certificate{{RawBytes: block.Bytes}},
	}
	material.Content = &protobundle.VerificationMaterial_X509CertificateChain{X509CertificateChain: chain}
	if entry, ok := annotations[annotationLogEntry]; ok {
		parsed, err := parseLegacyLogEntry([]byte(entry))
		if err != nil {
			return nil, fmt.Errorf("annotation %s is not an entry of a transparency log", annotationLogEntry)
		}
		material.TlogEntries = []*protorekor.TransparencyLogEntry{parsed}
	}
	if text, ok := annotations[annotationTimestamp]; ok {
		var signed struct{ SignedRFC3161Timestamp []byte }
		if err := json.Unmarshal([]byte(text), &signed); err != nil {
			return nil, fmt.Errorf("annotation %s is not a timestamp", annotationTimestamp)
		}
		material.TimestampVerificationData = &protobundle.TimestampVerificationData{
			Rfc3161Timestamps: []*protocommon.RFC3161SignedTimestamp{{SignedTimestamp: signed.SignedRFC3161Timestamp}},
		}
	}
	return material, nil
}

// parseLegacyLogEntry parses the entry of the transparency log in the annotation of a legacy signature.
func parseLegacyLogEntry(text []byte) (*protorekor.TransparencyLogEntry, error) {
	var logged struct {
		SignedEntryTimestamp []byte
		Payload              struct {
			Body           []byte `json:"body"`
			IntegratedTime int64  `json:"integratedTime"`
			LogIndex       int64  `json:"logIndex"`
			LogID          string `json:"logID"`
		}
	}
	if err := json.Unmarshal(text, &logged); err != nil {
		return nil, err
	}
	var kind struct{ Kind, APIVersion string }
	if err := json.Unmarshal(logged.Payload.Body, &kind); err != nil {
		return nil, err
	}
	id, err := hex.DecodeString(logged.Payload.LogID)
	if err != nil {
		return nil, err
	}
	return &protorekor.TransparencyLogEntry{
		LogIndex:          logged.Payload.LogIndex,
		LogId:             &protocommon.LogId{KeyId: id},
		KindVersion:       &protorekor.KindVersion{Kind: kind.Kind, Version: kind.APIVersion},
		IntegratedTime:    logged.Payload.IntegratedTime,
		InclusionPromise:  &protorekor.InclusionPromise{SignedEntryTimestamp: logged.SignedEntryTimestamp},
		CanonicalizedBody: logged.Payload.Body,
	}, nil
}
