package approvals

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	tokenapi "k8s.io/cluster-bootstrap/token/api"
	tokenutil "k8s.io/cluster-bootstrap/token/util"

	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

const (
	pemTypeCSR = "CERTIFICATE REQUEST"
	// minRSABits is the minimal length of an RSA key.
	minRSABits = 2048
	// maxIDLength limits the characters of a cluster's id; a uid has 36.
	maxIDLength = 253
)

// ParsedCSR is the content of a CertificateSigningRequest for the certificate of an agent.
type ParsedCSR struct {
	// Cluster is the name of the agent's Cluster.
	Cluster string
	// ID is the UID of that cluster's kube-system namespace; empty if Renewal.
	ID string
	// Renewal is true for the next certificate of a registered agent.
	Renewal bool
	// TokenID is the id of the requester's bootstrap token; empty if Renewal.
	TokenID string
	// Until is the time until which the requester waits; zero if it is not known.
	Until time.Time
}

// ValidateCSR parses a CertificateSigningRequest. isForAgent is false if it does not request the certificate of an
// agent. If isForAgent is true, err is the reason why no agent may get the certificate, or nil. The caller must still
// authorize the requester, by the user and the groups that the API server has written into the request.
func ValidateCSR(csr *certificatesv1.CertificateSigningRequest) (p ParsedCSR, isForAgent bool, err error) {
	if csr.Spec.SignerName != bootstrap.Signer {
		return ParsedCSR{}, false, nil
	}
	if !hasAgentSubject(csr.Spec.Request) {
		return ParsedCSR{}, false, nil
	}
	request, err := parseRequest(csr.Spec.Request)
	if err != nil {
		return ParsedCSR{}, true, oneLine(err)
	}
	if err := errors.Join(checkSubject(request), checkExtensions(request), checkKey(request), checkUsages(csr.Spec.Usages), checkLifetime(csr.Spec.ExpirationSeconds)); err != nil {
		return ParsedCSR{}, true, oneLine(err)
	}
	p.Cluster = strings.TrimPrefix(request.Subject.CommonName, bootstrap.AgentUserPrefix)
	if err := karmada.ValidateName(p.Cluster); err != nil {
		return ParsedCSR{}, true, oneLine(err)
	}
	if err := p.setRequester(csr); err != nil {
		return ParsedCSR{}, true, oneLine(err)
	}
	if until := csr.Annotations[kube.AnnotationUntil]; until != "" {
		if p.Until, err = time.Parse(time.RFC3339, until); err != nil {
			return ParsedCSR{}, true, fmt.Errorf("annotation %s is no time", kube.AnnotationUntil)
		}
	}
	return p, true, nil
}

// oneLine returns an error with the text of err on one line: joined errors and names of users can have line breaks.
func oneLine(err error) error {
	return errors.New(kube.OneLine(strings.ReplaceAll(err.Error(), "\n", "; ")))
}

// hasAgentSubject returns whether any PEM block in text requests the group or the user name of an agent. Text that
// parseRequest rejects counts too: such a request must be denied, not ignored.
func hasAgentSubject(text []byte) bool {
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		request, err := x509.ParseCertificateRequest(block.Bytes)
		if err != nil {
			continue
		}
		if slices.Contains(request.Subject.Organization, bootstrap.AgentsGroup) {
			return true
		}
		for _, name := range request.Subject.Names {
			if value, ok := name.Value.(string); ok && strings.HasPrefix(value, bootstrap.AgentUserPrefix) {
				return true
			}
		}
	}
	return false
}

// parseRequest parses text, which must be exactly one request in PEM. With more text, the signer could sign another
// request than the validated one.
func parseRequest(text []byte) (*x509.CertificateRequest, error) {
	block, rest := pem.Decode(text)
	if block == nil || !bytes.HasPrefix(bytes.TrimSpace(text), []byte("-----BEGIN ")) {
		return nil, errors.New("the request is not in PEM")
	}
	if block.Type != pemTypeCSR {
		return nil, fmt.Errorf("the PEM block of the request is of type %q and must be of type %q", block.Type, pemTypeCSR)
	}
	if len(block.Headers) > 0 {
		return nil, errors.New("the PEM block of the request has headers")
	}
	if len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("something follows the PEM block of the request")
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("parse the request: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return nil, fmt.Errorf("check the signature of the request: %w", err)
	}
	return request, nil
}

// checkSubject accepts only one organization and one common name, because other systems may interpret other attributes.
func checkSubject(request *x509.CertificateRequest) error {
	subject := request.Subject
	if !slices.Equal(subject.Organization, []string{bootstrap.AgentsGroup}) {
		return fmt.Errorf("the organization must be exactly [%s], and is %q", bootstrap.AgentsGroup, subject.Organization)
	}
	if !strings.HasPrefix(subject.CommonName, bootstrap.AgentUserPrefix) {
		return fmt.Errorf("the common name must begin with %s", bootstrap.AgentUserPrefix)
	}
	organization, commonName := asn1.ObjectIdentifier{2, 5, 4, 10}, asn1.ObjectIdentifier{2, 5, 4, 3}
	for _, name := range subject.Names {
		if !name.Type.Equal(organization) && !name.Type.Equal(commonName) {
			return fmt.Errorf("the subject has an attribute %s beside organization and common name", name.Type)
		}
	}
	if len(subject.Names) != 2 {
		return errors.New("the subject has more than one common name")
	}
	return nil
}

// checkExtensions accepts no extension: an agent needs none.
func checkExtensions(request *x509.CertificateRequest) error {
	subjectAltName := asn1.ObjectIdentifier{2, 5, 29, 17}
	for _, extension := range request.Extensions {
		if extension.Id.Equal(subjectAltName) {
			return errors.New("subject alternative names (DNS, e-mail, IP, URI or others) are not allowed")
		}
	}
	if len(request.Extensions) > 0 {
		return fmt.Errorf("extension %s is not allowed", request.Extensions[0].Id)
	}
	return nil
}

func checkKey(request *x509.CertificateRequest) error {
	switch key := request.PublicKey.(type) {
	case *rsa.PublicKey:
		if key.N.BitLen() < minRSABits {
			return fmt.Errorf("the RSA key has %d bits and must have at least %d", key.N.BitLen(), minRSABits)
		}
	case *ecdsa.PublicKey, ed25519.PublicKey:
	default:
		return errors.New("the key is of an unknown kind")
	}
	return nil
}

// checkUsages accepts the usages of a client, each once. Key encipherment, which has a meaning for RSA only, is
// optional.
func checkUsages(given []certificatesv1.KeyUsage) error {
	usages := slices.Clone(given)
	slices.Sort(usages)
	clientUsages := []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth, certificatesv1.UsageDigitalSignature}
	withRSA := []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth, certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment}
	if !slices.Equal(usages, clientUsages) && !slices.Equal(usages, withRSA) {
		return fmt.Errorf("the usages must be digital signature, client auth and perhaps key encipherment, and are %q", given)
	}
	return nil
}

// checkLifetime accepts a lifetime of at most bootstrap.MaxLife: a certificate cannot be revoked. A certificate without
// expirationSeconds gets the longest lifetime of the signer (--cluster-signing-duration), which can be ten years.
func checkLifetime(seconds *int32) error {
	longest := int32(bootstrap.MaxLife / time.Second)
	if seconds == nil {
		return fmt.Errorf("spec.expirationSeconds is not set, and must be at most %d", longest)
	}
	if *seconds > longest {
		return fmt.Errorf("spec.expirationSeconds must be at most %d, and is %d", longest, *seconds)
	}
	return nil
}

// setRequester sets the fields about the requester. It returns an error unless the requester is the holder of a
// bootstrap token or the registered agent.
func (p *ParsedCSR) setRequester(csr *certificatesv1.CertificateSigningRequest) error {
	user, groups := csr.Spec.Username, csr.Spec.Groups
	if user == bootstrap.AgentUser(p.Cluster) && slices.Contains(groups, bootstrap.AgentsGroup) {
		p.Renewal = true
		return nil
	}
	if strings.HasPrefix(user, bootstrap.AgentUserPrefix) {
		return fmt.Errorf("%s may not have the certificate of the agent of cluster %s", user, p.Cluster)
	}
	id, ok := strings.CutPrefix(user, bootstrap.TokenUserPrefix)
	if !ok || !slices.Contains(groups, tokenapi.BootstrapDefaultGroup) || !tokenutil.IsValidBootstrapTokenID(id) {
		return fmt.Errorf("%s came with no bootstrap token and is not the agent of cluster %s", user, p.Cluster)
	}
	if boundCluster, isBound := bootstrap.BoundCluster(groups); isBound && boundCluster != p.Cluster {
		return fmt.Errorf("the bootstrap token is for cluster %q alone", boundCluster)
	}
	p.TokenID, p.ID = id, csr.Annotations[kube.AnnotationClusterID]
	if p.ID == "" || len(p.ID) > maxIDLength || strings.ContainsFunc(p.ID, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return fmt.Errorf("annotation %s must be the uid of the cluster's namespace kube-system", kube.AnnotationClusterID)
	}
	return nil
}
