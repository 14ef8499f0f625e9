package approvals_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/towline/towline/internal/hub/approvals"
	"github.com/towline/towline/internal/kube"
)

const clusterID = "0e0c1b9c-5d3f-4d5c-9d38-6c1a2f6b9a11"

// csrBuilder builds a CertificateSigningRequest, by default one that an agent creates.
type csrBuilder struct {
	template x509.CertificateRequest
	key      crypto.Signer
	kind     string
	rewrap   func(text []byte) []byte
	csr      certificatesv1.CertificateSigningRequest
}

func newCSRBuilder(t testing.TB) *csrBuilder {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &csrBuilder{key: key, kind: "CERTIFICATE REQUEST"}
	a.template.Subject = pkix.Name{CommonName: "system:karmada:agent:member1", Organization: []string{"system:karmada:agents"}}
	a.csr.ObjectMeta = metav1.ObjectMeta{Name: "member1-abcde", Annotations: map[string]string{kube.AnnotationClusterID: clusterID}}
	a.csr.Spec = certificatesv1.CertificateSigningRequestSpec{
		SignerName: "kubernetes.io/kube-apiserver-client",
		Usages:     []certificatesv1.KeyUsage{"digital signature", "client auth"},
		Username:   "system:bootstrap:abcdef",
		Groups:     []string{"system:bootstrappers", "system:bootstrappers:karmada:default-cluster-token", "system:authenticated"},

		ExpirationSeconds: ptr.To[int32](3600),
	}
	return a
}

// setAgentRequester sets the agent of cluster as the requester.
func (a *csrBuilder) setAgentRequester(cluster string) {
	a.csr.Spec.Username, a.csr.Spec.Groups = "system:karmada:agent:"+cluster, []string{"system:karmada:agents", "system:authenticated"}
	delete(a.csr.Annotations, kube.AnnotationClusterID)
}

func (a *csrBuilder) setCommonName(commonName string) { a.template.Subject.CommonName = commonName }

func (a *csrBuilder) build(t testing.TB) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &a.template, a.key)
	if err != nil {
		t.Fatal(err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: a.kind, Bytes: der})
	if a.rewrap != nil {
		text = a.rewrap(text)
	}
	a.csr.Spec.Request = text
	return &a.csr
}

func attribute(oid asn1.ObjectIdentifier, value string) pkix.AttributeTypeAndValue {
	return pkix.AttributeTypeAndValue{Type: oid, Value: value}
}

func TestValidateCSRAcceptsAgents(t *testing.T) {
	t.Parallel()
	first := approvals.ParsedCSR{Cluster: "member1", ID: clusterID, TokenID: "abcdef"}
	until := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	late := first
	late.Until = until
	tests := map[string]struct {
		change func(*csrBuilder)
		want   approvals.ParsedCSR
	}{
		"first certificate":       {func(*csrBuilder) {}, first},
		"with key encipherment":   {func(a *csrBuilder) { a.csr.Spec.Usages = append(a.csr.Spec.Usages, "key encipherment") }, first},
		"a year":                  {func(a *csrBuilder) { a.csr.Spec.ExpirationSeconds = ptr.To[int32](31536000) }, first},
		"usages in another order": {func(a *csrBuilder) { slices.Reverse(a.csr.Spec.Usages) }, first},
		"with a deadline":         {func(a *csrBuilder) { a.csr.Annotations[kube.AnnotationUntil] = until.Format(time.RFC3339) }, late},
		"blanks after the block":  {func(a *csrBuilder) { a.rewrap = func(text []byte) []byte { return append(text, "\n \n"...) } }, first},
		"an agent's next one":     {func(a *csrBuilder) { a.setAgentRequester("member1") }, approvals.ParsedCSR{Cluster: "member1", Renewal: true}},
		"a token for this cluster alone": {func(a *csrBuilder) {
			a.csr.Spec.Groups = append(a.csr.Spec.Groups, "system:bootstrappers:karmada:cluster:member1")
		}, first},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newCSRBuilder(t)
			tc.change(a)
			got, ours, err := approvals.ValidateCSR(a.build(t))
			if err != nil || !ours {
				t.Fatalf("ours %v, error %v", ours, err)
			}
			if diff := cmp.Diff(got, tc.want); diff != "" {
				t.Errorf("petition (-got +want):\n%s", diff)
			}
		})
	}
}

func TestValidateCSRIgnoresOtherRequests(t *testing.T) {
	t.Parallel()
	tests := map[string]func(*csrBuilder){
		"another signer": func(a *csrBuilder) { a.csr.Spec.SignerName = "kubernetes.io/kubelet-serving" },
		"a person": func(a *csrBuilder) {
			a.setCommonName("jane")
			a.template.Subject.Organization = []string{"developers"}
		},
		"a node": func(a *csrBuilder) {
			a.setCommonName("system:node:n1")
			a.template.Subject.Organization = []string{"system:nodes"}
		},
		"no PEM": func(a *csrBuilder) { a.rewrap = func([]byte) []byte { return []byte("nonsense") } },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newCSRBuilder(t)
			change(a)
			if _, ours, err := approvals.ValidateCSR(a.build(t)); ours || err != nil {
				t.Errorf("ours %v, error %v", ours, err)
			}
		})
	}
}

// subjectAttacks are about who the certificate would be for.
func subjectAttacks() map[string]attack {
	surname, uid := asn1.ObjectIdentifier{2, 5, 4, 4}, asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57683, 2}
	commonName := asn1.ObjectIdentifier{2, 5, 4, 3}
	return map[string]attack{
		"no organization": {func(a *csrBuilder) { a.template.Subject.Organization = nil }, "organization must be exactly"},
		"another organization": {func(a *csrBuilder) {
			a.template.Subject.Organization = []string{"system:masters"}
		}, "organization must be exactly"},
		"an organization more": {func(a *csrBuilder) {
			a.template.Subject.Organization = []string{"system:karmada:agents", "system:masters"}
		}, "organization must be exactly"},
		"the organization twice": {func(a *csrBuilder) {
			a.template.Subject.Organization = []string{"system:karmada:agents", "system:karmada:agents"}
		}, "organization must be exactly"},
		"another common name":      {func(a *csrBuilder) { a.setCommonName("system:admin") }, "common name must begin with"},
		"the prefix alone":         {func(a *csrBuilder) { a.setCommonName("system:karmada:agent:") }, "must be not empty"},
		"the reserved name":        {func(a *csrBuilder) { a.setCommonName("system:karmada:agent:rbac-generator") }, "is reserved"},
		"an upper-case name":       {func(a *csrBuilder) { a.setCommonName("system:karmada:agent:Member1") }, "invalid cluster name"},
		"a name with a colon":      {func(a *csrBuilder) { a.setCommonName("system:karmada:agent:a:b") }, "invalid cluster name"},
		"a name with a slash":      {func(a *csrBuilder) { a.setCommonName("system:karmada:agent:a/b") }, "invalid cluster name"},
		"a name with a line break": {func(a *csrBuilder) { a.setCommonName("system:karmada:agent:member1\n") }, "invalid cluster name"},
		"a name of 49 characters": {func(a *csrBuilder) {
			a.setCommonName("system:karmada:agent:" + strings.Repeat("a", 49))
		}, "no more than 48 characters"},
		"two common names": {func(a *csrBuilder) {
			a.template.Subject = pkix.Name{ExtraNames: []pkix.AttributeTypeAndValue{
				attribute(asn1.ObjectIdentifier{2, 5, 4, 10}, "system:karmada:agents"),
				attribute(commonName, "system:karmada:agent:other"), attribute(commonName, "system:karmada:agent:member1"),
			}}
		}, "more than one common name"},
		"an attribute more": {func(a *csrBuilder) {
			a.template.Subject.ExtraNames = []pkix.AttributeTypeAndValue{attribute(surname, "x")}
		}, "has an attribute"},
		"a uid": {func(a *csrBuilder) {
			a.template.Subject.ExtraNames = []pkix.AttributeTypeAndValue{attribute(uid, "x")}
		}, "has an attribute"},
		"an organizational unit": {func(a *csrBuilder) { a.template.Subject.OrganizationalUnit = []string{"x"} }, "has an attribute"},
	}
}

// contentAttacks have further fields of a certificate, or another encoding of the request.
func contentAttacks(t *testing.T) map[string]attack {
	t.Helper()
	weak, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	mailto, err := url.Parse("spiffe://x/y")
	if err != nil {
		t.Fatal(err)
	}
	extension := func(oid asn1.ObjectIdentifier, value []byte) func(*csrBuilder) {
		return func(a *csrBuilder) { a.template.ExtraExtensions = []pkix.Extension{{Id: oid, Value: value}} }
	}
	const san, unknown = "subject alternative names", "is not allowed"
	return map[string]attack{
		"a DNS name":      {func(a *csrBuilder) { a.template.DNSNames = []string{"kubernetes.default"} }, san},
		"an address":      {func(a *csrBuilder) { a.template.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 1)} }, san},
		"an e-mail":       {func(a *csrBuilder) { a.template.EmailAddresses = []string{"a@example.com"} }, san},
		"a URI":           {func(a *csrBuilder) { a.template.URIs = []*url.URL{mailto} }, san},
		"another SAN":     {extension(asn1.ObjectIdentifier{2, 5, 29, 17}, []byte{0x30, 0x05, 0x88, 0x03, 0x2a, 0x03, 0x04}), san},
		"a CA":            {extension(asn1.ObjectIdentifier{2, 5, 29, 19}, []byte{0x30, 0x03, 0x01, 0x01, 0xff}), unknown},
		"a key usage":     {extension(asn1.ObjectIdentifier{2, 5, 29, 15}, []byte{0x03, 0x02, 0x02, 0x04}), unknown},
		"a weak key":      {func(a *csrBuilder) { a.key = weak }, "must have at least 2048"},
		"server auth":     {func(a *csrBuilder) { a.csr.Spec.Usages = append(a.csr.Spec.Usages, "server auth") }, "usages must be"},
		"cert sign":       {func(a *csrBuilder) { a.csr.Spec.Usages = append(a.csr.Spec.Usages, "cert sign") }, "usages must be"},
		"a usage twice":   {func(a *csrBuilder) { a.csr.Spec.Usages = append(a.csr.Spec.Usages, "client auth") }, "usages must be"},
		"no client auth":  {func(a *csrBuilder) { a.csr.Spec.Usages = a.csr.Spec.Usages[:1] }, "usages must be"},
		"no life":         {func(a *csrBuilder) { a.csr.Spec.ExpirationSeconds = nil }, "expirationSeconds is not set"},
		"a year and more": {func(a *csrBuilder) { a.csr.Spec.ExpirationSeconds = ptr.To[int32](31536001) }, "must be at most 31536000"},
		"ten years":       {func(a *csrBuilder) { a.csr.Spec.ExpirationSeconds = ptr.To[int32](10 * 31536000) }, "must be at most 31536000"},
		"no usages":       {func(a *csrBuilder) { a.csr.Spec.Usages = nil }, "usages must be"},
		"another PEM":     {func(a *csrBuilder) { a.kind = "NEW CERTIFICATE REQUEST" }, "is of type"},
		"a certificate":   {func(a *csrBuilder) { a.kind = "CERTIFICATE" }, "is of type"},
		"trailing data":   {func(a *csrBuilder) { a.rewrap = func(text []byte) []byte { return append(text, "more"...) } }, "follows the PEM block"},
		"leading data":    {func(a *csrBuilder) { a.rewrap = func(text []byte) []byte { return append([]byte("more\n"), text...) } }, "not in PEM"},
		"several blocks":  {func(a *csrBuilder) { a.rewrap = func(text []byte) []byte { return append(text, text...) } }, "follows the PEM block"},
		"ours comes last": {func(a *csrBuilder) { a.rewrap = prependRequest }, ""},
		"a PEM header": {func(a *csrBuilder) {
			a.rewrap = func(text []byte) []byte {
				block, _ := pem.Decode(text)
				block.Headers = map[string]string{"x": "y"}
				return pem.EncodeToMemory(block)
			}
		}, "has headers"},
		"a forged signature": {func(a *csrBuilder) {
			a.rewrap = func(text []byte) []byte {
				block, _ := pem.Decode(text)
				block.Bytes[len(block.Bytes)-1] ^= 1
				return pem.EncodeToMemory(block)
			}
		}, "signature"},
	}
}

// prependRequest puts a block that cannot be parsed before text.
func prependRequest(text []byte) []byte {
	return append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: []byte("x")}), text...)
}

// requesterAttacks have a requester that may not have the certificate.
func requesterAttacks() map[string]attack {
	return map[string]attack{
		"the next certificate of another agent": {func(a *csrBuilder) { a.setAgentRequester("other") }, "may not have the certificate of the agent of cluster member1"},
		"an agent's name without its group": {func(a *csrBuilder) {
			a.setAgentRequester("member1")
			a.csr.Spec.Groups = []string{"system:authenticated"}
		}, "may not have the certificate"},
		"somebody":                    {func(a *csrBuilder) { a.csr.Spec.Username = "jane" }, "came with no bootstrap token"},
		"a service account":           {func(a *csrBuilder) { a.csr.Spec.Username = "system:serviceaccount:default:x" }, "came with no bootstrap token"},
		"nobody":                      {func(a *csrBuilder) { a.csr.Spec.Username = "" }, "came with no bootstrap token"},
		"a token's name, not a token": {func(a *csrBuilder) { a.csr.Spec.Username = "system:bootstrap:../x" }, "came with no bootstrap token"},
		"a token without its group":   {func(a *csrBuilder) { a.csr.Spec.Groups = []string{"system:authenticated"} }, "came with no bootstrap token"},
		"no id":                       {func(a *csrBuilder) { delete(a.csr.Annotations, kube.AnnotationClusterID) }, "must be the uid"},
		"an id with blanks":           {func(a *csrBuilder) { a.csr.Annotations[kube.AnnotationClusterID] = "a b" }, "must be the uid"},
		"an id without an end": {func(a *csrBuilder) {
			a.csr.Annotations[kube.AnnotationClusterID] = strings.Repeat("a", 254)
		}, "must be the uid"},
		"a deadline that is no time": {func(a *csrBuilder) { a.csr.Annotations[kube.AnnotationUntil] = "soon" }, "is no time"},
		"a token for another cluster alone": {func(a *csrBuilder) {
			a.csr.Spec.Groups = append(a.csr.Spec.Groups, "system:bootstrappers:karmada:cluster:other")
		}, `for cluster "other" alone`},
		"a token for two clusters alone": {func(a *csrBuilder) {
			a.csr.Spec.Groups = append(a.csr.Spec.Groups, "system:bootstrappers:karmada:cluster:member1", "system:bootstrappers:karmada:cluster:other")
		}, "alone"},
	}
}

// attack is a request that must be denied, and part of the reason; "" for any reason.
type attack struct {
	change func(*csrBuilder)
	want   string
}

func TestValidateCSRRejectsAttacks(t *testing.T) {
	t.Parallel()
	for _, attacks := range []map[string]attack{subjectAttacks(), contentAttacks(t), requesterAttacks()} {
		for name, tc := range attacks {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				a := newCSRBuilder(t)
				tc.change(a)
				p, ours, err := approvals.ValidateCSR(a.build(t))
				if !ours || err == nil {
					t.Fatalf("petition %+v, ours %v, error %v", p, ours, err)
				}
				if !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
					t.Errorf("error %q, want one line with %q", err, tc.want)
				}
				if p != (approvals.ParsedCSR{}) {
					t.Errorf("petition %+v beside the error", p)
				}
			})
		}
	}
}
