package approvals_test

import (
	"crypto/x509"
	"encoding/pem"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/towline/towline/internal/hub/approvals"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzValidateCSR reads requests for certificates of agents. An accepted request is for the agent that it names, by a
// requester who may ask for that, and its subject has nothing else.
func FuzzValidateCSR(f *testing.F) {
	valid := newCSRBuilder(f).build(f)
	add := func(request []byte, user, group, id, usage string) {
		f.Add(request, user, group, id, usage, "", true, int32(3600))
	}
	add(valid.Spec.Request, valid.Spec.Username, "system:bootstrappers", clusterID, "client auth")
	add(append([]byte("x"), valid.Spec.Request...), valid.Spec.Username, "system:bootstrappers", clusterID, "client auth")
	add(append(valid.Spec.Request, valid.Spec.Request...), valid.Spec.Username, "system:bootstrappers", clusterID, "client auth")
	add(valid.Spec.Request, "system:karmada:agent:member1", "system:karmada:agents", "", "client auth")
	add(valid.Spec.Request, "system:karmada:agent:member2", "system:karmada:agents", "", "server auth")
	f.Add(valid.Spec.Request, valid.Spec.Username, "system:bootstrappers", clusterID, "client auth", "", false, int32(0))
	f.Add(valid.Spec.Request, valid.Spec.Username, "system:bootstrappers", clusterID, "client auth", "", true, int32(31536001))
	f.Add([]byte("-----BEGIN CERTIFICATE REQUEST-----\n\n-----END CERTIFICATE REQUEST-----\n"), "a\nb", "", "a\nb", "", "yesterday", true, int32(-1))
	f.Fuzz(func(t *testing.T, request []byte, user, group, id, usage, until string, hasLife bool, seconds int32) {
		csr := &certificatesv1.CertificateSigningRequest{}
		csr.Annotations = map[string]string{kube.AnnotationClusterID: id, kube.AnnotationUntil: until}
		csr.Spec = certificatesv1.CertificateSigningRequestSpec{
			SignerName: bootstrap.Signer, Request: request, Username: user, Groups: []string{group, "system:authenticated"},
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.KeyUsage(usage)},
		}
		if hasLife {
			csr.Spec.ExpirationSeconds = &seconds
		}
		parsed, isAgent, err := approvals.ValidateCSR(csr)
		fuzzing.OneLine(t, err)
		if !isAgent || err != nil {
			return
		}
		if !hasLife || seconds > 365*24*3600 {
			t.Errorf("accepted with a life of %d seconds (given: %v)", seconds, hasLife)
		}
		block, _ := pem.Decode(request)
		inner, err := x509.ParseCertificateRequest(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		if inner.Subject.CommonName != "system:karmada:agent:"+parsed.Cluster || karmada.ValidateName(parsed.Cluster) != nil {
			t.Errorf("the request is for %q, and accepted for cluster %q", inner.Subject.CommonName, parsed.Cluster)
		}
		isToken := strings.HasPrefix(user, "system:bootstrap:") && group == "system:bootstrappers" && parsed.TokenID != "" && parsed.ID == id
		isSelf := user == "system:karmada:agent:"+parsed.Cluster && group == "system:karmada:agents" && parsed.Renewal
		if isToken == isSelf {
			t.Errorf("accepted for user %q with group %q: %+v", user, group, parsed)
		}
		if usage != string(certificatesv1.UsageClientAuth) || len(inner.Extensions) > 0 || len(inner.Subject.Names) != 2 {
			t.Errorf("accepted with usage %q and %+v", usage, inner.Subject)
		}
	})
}
