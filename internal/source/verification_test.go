package source_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/source"
)

func TestVerificationFor(t *testing.T) {
	t.Parallel()
	hub, tmplCtx := createHub(t,
		secret("keys-eu-1", corev1.SecretTypeOpaque, map[string]string{"keyring.gpg": "keys", "cosign.pub": "PEM", "trusted_root.json": "{}"}),
		secret("empty", corev1.SecretTypeOpaque, map[string]string{"keyring.gpg": ""}),
	)
	keys := &corev1.SecretReference{Namespace: "{{ .ClusterNamespace }}", Name: "keys-{{ .ClusterName }}"}
	empty, none := &corev1.SecretReference{Name: "empty"}, &corev1.SecretReference{Name: "none"}
	provenance := func(ref *corev1.SecretReference) configv1beta1.HelmChart {
		return configv1beta1.HelmChart{ProvenanceVerification: &configv1beta1.ProvenanceVerification{KeyringSecretRef: ref}}
	}
	signature := func(provider configv1beta1.SignatureProvider, ref *corev1.SecretReference, identities ...configv1beta1.OIDCIdentityMatch) configv1beta1.HelmChart {
		return configv1beta1.HelmChart{SignatureVerification: &configv1beta1.SignatureVerification{
			Provider: provider, SecretRef: ref, MatchOIDCIdentity: identities,
		}}
	}
	identity := configv1beta1.OIDCIdentityMatch{Issuer: "^https://issuer$", Subject: "^{{ .ClusterName }}$"}
	expanded := []configv1beta1.OIDCIdentityMatch{{Issuer: "^https://issuer$", Subject: "^eu-1$"}}
	both := provenance(keys)
	both.SignatureVerification = signature("PublicKey", keys).SignatureVerification
	for name, test := range map[string]struct {
		chart configv1beta1.HelmChart
		want  source.Verification
		err   string
		// later is true if the error is not phase.TerminalError, because the Secret may be created later.
		later bool
	}{
		"none":        {},
		"provenance":  {chart: provenance(keys), want: source.Verification{Keyring: []byte("keys")}},
		"public key":  {chart: signature("PublicKey", keys), want: source.Verification{Signature: &source.SignatureRequirement{PublicKey: []byte("PEM")}}},
		"both":        {chart: both, want: source.Verification{Keyring: []byte("keys"), Signature: &source.SignatureRequirement{PublicKey: []byte("PEM")}}},
		"public root": {chart: signature("Keyless", nil, identity), want: source.Verification{Signature: &source.SignatureRequirement{Identities: expanded}}},
		"own root": {
			chart: signature("Keyless", keys, identity),
			want:  source.Verification{Signature: &source.SignatureRequirement{Identities: expanded, TrustRoot: []byte("{}")}},
		},
		"no keyring named":    {chart: provenance(nil), err: "provenanceVerification.keyringSecretRef: it must name a Secret with the key keyring.gpg"},
		"no Secret":           {chart: provenance(none), err: "provenanceVerification.keyringSecretRef: Secret NS/none does not exist", later: true},
		"empty key":           {chart: provenance(empty), err: "provenanceVerification.keyringSecretRef: Secret NS/empty has no key keyring.gpg"},
		"no public key named": {chart: signature("PublicKey", nil), err: "signatureVerification.secretRef: it must name a Secret with the key cosign.pub"},
		"no public key":       {chart: signature("PublicKey", empty), err: "signatureVerification.secretRef: Secret NS/empty has no key cosign.pub"},
		"no root":             {chart: signature("Keyless", empty, identity), err: "signatureVerification.secretRef: Secret NS/empty has no key trusted_root.json"},
		"no identity":         {chart: signature("Keyless", nil), err: "signatureVerification.matchOIDCIdentity: provider Keyless needs at least one identity"},
		"no expression": {
			chart: signature("Keyless", nil, identity, configv1beta1.OIDCIdentityMatch{Issuer: ".*", Subject: "("}),
			err:   "signatureVerification.matchOIDCIdentity[1].subject: error parsing regexp",
		},
		"no field": {
			chart: signature("Keyless", nil, configv1beta1.OIDCIdentityMatch{Issuer: "{{ .None }}", Subject: "."}),
			err:   "signatureVerification.matchOIDCIdentity[0].issuer: expand issuer",
		},
		"nothing left": {
			chart: signature("Keyless", nil, configv1beta1.OIDCIdentityMatch{Issuer: `{{ "" }}`, Subject: "."}),
			err:   "signatureVerification.matchOIDCIdentity[0].issuer: is empty",
		},
		"no provider": {chart: signature("", keys), err: `signatureVerification.provider: "" is neither PublicKey nor Keyless`},
	} {
		got, err := source.VerificationFor(t.Context(), hub, test.chart, tmplCtx)
		t.Run(name, func(t *testing.T) {
			if test.err == "" {
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("verification differs (-want +got):\n%s", diff)
				}
				return
			}
			want := strings.ReplaceAll(test.err, "NS", tmplCtx.Namespace)
			if test.later {
				wantTexts(t, err, want)
				return
			}
			wantInvalid(t, err, want)
		})
	}
}
