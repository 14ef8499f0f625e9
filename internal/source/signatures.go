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
	"oras.land/oras-go/v2/errdef"
	"oras.land/oras-go/v2/registry/remote"
)

const (
	// maxSignatures is how many signatures of one artifact are looked at, in each layout.
	maxSignatures = 50
	// maxSignature is far more than a signature with its certificate and log entry needs.
	maxSignature = 1 << 20

	classicMediaType = "application/vnd.dev.cosign.simplesigning.v1+json"
	bundleMediaType  = "application/vnd.dev.sigstore.bundle"

	annotationSignature   = "dev.cosignproject.cosign/signature"
	annotationCertificate = "dev.sigstore.cosign/certificate"
	annotationLogEntry    = "dev.sigstore.cosign/bundle"
	annotationPredicate   = "dev.sigstore.bundle.predicateType"
	annotationTimestamp   = "dev.sigstore.cosign/rfc3161timestamp"
)

// classicSignatures reads the tag sha256-<digest>.sig: a layer for each signature, with the signed text as its content.
func (r *ociRegistry) classicSignatures(ctx context.Context, at location) (found []cosigned, unreadable []error, err error) {
	opened, err := r.open(at.url)
	if err != nil {
		return nil, nil, err
	}
	manifest, err := readManifest(ctx, opened, strings.ReplaceAll(at.digest, ":", "-")+".sig")
	if errors.Is(err, errdef.ErrNotFound) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	for _, layer := range manifest.Layers[:min(len(manifest.Layers), maxSignatures)] {
		if layer.MediaType != classicMediaType {
			continue
		}
		if layer.Size > maxSignature {
			unreadable = append(unreadable, fmt.Errorf("it has more than %d MiB", maxSignature>>20))
			continue
		}
		payload, err := fetch(ctx, opened, layer, maxSignature)
		if err != nil {
			return nil, nil, fmt.Errorf("read a signature of %s: %w", opened.Reference.Repository, err)
		}
		signed, err := classicBundle(payload, layer.Annotations)
		if err != nil {
			unreadable = append(unreadable, err)
			continue
		}
		found = append(found, cosigned{bundle: signed, payload: payload})
	}
	return found, unreadable, nil
}

// bundleSignatures reads the Sigstore bundles that refer to the artifact, as OCI 1.1 has it.
func (r *ociRegistry) bundleSignatures(ctx context.Context, at location) (found []cosigned, unreadable []error, err error) {
	opened, err := r.open(at.url)
	if err != nil {
		return nil, nil, err
	}
	referrers, err := listSignatures(ctx, opened, at.digest)
	if err != nil {
		return nil, nil, err
	}
	for _, referrer := range referrers {
		manifest, err := readManifest(ctx, opened, referrer.Digest.String())
		if err != nil {
			return nil, nil, err
		}
		index := slices.IndexFunc(manifest.Layers, func(l ocispec.Descriptor) bool { return strings.HasPrefix(l.MediaType, bundleMediaType) })
		if index < 0 {
			continue
		}
		layer := manifest.Layers[index]
		if layer.Size > maxSignature {
			unreadable = append(unreadable, fmt.Errorf("it has more than %d MiB", maxSignature>>20))
			continue
		}
		raw, err := fetch(ctx, opened, layer, maxSignature)
		if err != nil {
			return nil, nil, fmt.Errorf("read a signature of %s: %w", opened.Reference.Repository, err)
		}
		signed := &bundle.Bundle{}
		if err := signed.UnmarshalJSON(raw); err != nil {
			unreadable = append(unreadable, err)
			continue
		}
		found = append(found, cosigned{bundle: signed})
	}
	return found, unreadable, nil
}

// listSignatures returns the artifacts that refer to the one with digest and can hold a bundle with a signature.
func listSignatures(ctx context.Context, opened *remote.Repository, digest string) ([]ocispec.Descriptor, error) {
	var referrers []ocispec.Descriptor
	subject := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: godigest.Digest(digest)}
	err := opened.Referrers(ctx, subject, "", func(page []ocispec.Descriptor) error {
		for _, referrer := range page {
			if mayBeSignature(referrer) && len(referrers) < maxSignatures {
				referrers = append(referrers, referrer)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the signatures of %s: %w", opened.Reference.Repository, plain(err))
	}
	return referrers, nil
}

// mayBeSignature says whether an artifact can hold a bundle with a signature. Some registries list the type of its
// configuration in place of its own. Cosign marks attestations, which can be large.
func mayBeSignature(referrer ocispec.Descriptor) bool {
	if kind, marked := referrer.Annotations[annotationPredicate]; marked && kind != signStatement {
		return false
	}
	return strings.HasPrefix(referrer.ArtifactType, bundleMediaType) ||
		slices.Contains([]string{"", ocispec.MediaTypeEmptyJSON}, referrer.ArtifactType)
}

// classicBundle makes a Sigstore bundle of a signature in cosign's classic layout, so that both are verified in one
// way.
func classicBundle(payload []byte, annotations map[string]string) (*bundle.Bundle, error) {
	raw, err := base64.StdEncoding.DecodeString(annotations[annotationSignature])
	if err != nil || len(raw) == 0 {
		return nil, fmt.Errorf("annotation %s is not a signature in base64", annotationSignature)
	}
	material, err := classicMaterial(annotations)
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

// classicMaterial returns what a signature is verified with: its certificate, log entry and timestamp, as far as it has
// them.
func classicMaterial(annotations map[string]string) (*protobundle.VerificationMaterial, error) {
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
	material.Content = &protobundle.VerificationMaterial_X509CertificateChain{X509CertificateChain: &protocommon.X509CertificateChain{
		Certificates: []*protocommon.X509Certificate{{RawBytes: block.Bytes}},
	}}
	if entry, ok := annotations[annotationLogEntry]; ok {
		parsed, err := classicLogEntry([]byte(entry))
		if err != nil {
			return nil, fmt.Errorf("annotation %s: %w", annotationLogEntry, err)
		}
		material.TlogEntries = []*protorekor.TransparencyLogEntry{parsed}
	}
	if text, ok := annotations[annotationTimestamp]; ok {
		var signed struct{ SignedRFC3161Timestamp []byte }
		if err := json.Unmarshal([]byte(text), &signed); err != nil {
			return nil, fmt.Errorf("annotation %s: %w", annotationTimestamp, err)
		}
		material.TimestampVerificationData = &protobundle.TimestampVerificationData{
			Rfc3161Timestamps: []*protocommon.RFC3161SignedTimestamp{{SignedTimestamp: signed.SignedRFC3161Timestamp}},
		}
	}
	return material, nil
}

func classicLogEntry(text []byte) (*protorekor.TransparencyLogEntry, error) {
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
