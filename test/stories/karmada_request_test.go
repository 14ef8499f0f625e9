package stories

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"net"
	"net/url"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

// certificateRequest is a request for a certificate with any content.
type certificateRequest struct {
	request x509.CertificateRequest
	usages  []certificatesv1.KeyUsage
	signer  string
	// id is the id of the cluster in the request.
	id string
	// expirationSeconds is spec.expirationSeconds, nil for the longest life of the signer.
	expirationSeconds *int32
}

// validRequest is the request of a cluster that registers.
func validRequest(cluster, id string) certificateRequest {
	return certificateRequest{
		request:           x509.CertificateRequest{Subject: pkix.Name{CommonName: bootstrap.AgentUser(cluster), Organization: []string{bootstrap.AgentsGroup}}},
		usages:            []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		signer:            bootstrap.Signer,
		id:                id,
		expirationSeconds: ptr.To[int32](3600),
	}
}

// with returns p with a change.
func (p certificateRequest) with(change func(p *certificateRequest)) certificateRequest {
	change(&p)
	return p
}

// tokenConfig returns a client configuration with only a token.
func (w *world) tokenConfig(token string) *rest.Config {
	config := rest.AnonymousClientConfig(w.hub.Config)
	config.BearerToken, config.QPS = token, -1
	return config
}

// newBootstrapToken creates a token, as an administrator of the hub.
func (w *world) newBootstrapToken() bootstrap.Token {
	w.t.Helper()
	token, err := w.createToken()
	if err != nil {
		w.t.Fatal(err)
	}
	return token
}

func (w *world) createToken() (bootstrap.Token, error) {
	hub := w.client(w.hub)
	return bootstrap.CreateToken(w.t.Context(), hub, bootstrap.TokenOptions{TTL: time.Hour})
}

// createRequest creates a request with the credential of config, and returns its name.
func (w *world) createRequest(config *rest.Config, p certificateRequest) (string, error) {
	csr, err := p.csr()
	if err != nil {
		return "", err
	}
	requests := kubernetes.NewForConfigOrDie(config).CertificatesV1().CertificateSigningRequests()
	var last error
	err = wait.PollUntilContextTimeout(w.t.Context(), pollInterval/2, waitTimeout, true, func(ctx context.Context) (bool, error) {
		var made *certificatesv1.CertificateSigningRequest
		if made, last = requests.Create(ctx, csr, metav1.CreateOptions{}); last == nil {
			csr.Name = made.Name
		}
		// An API server needs a moment before it accepts a new token.
		return !apierrors.IsUnauthorized(last), nil
	})
	return csr.Name, errors.Join(err, last)
}

// csr returns the API object of the request.
func (p certificateRequest) csr() (*certificatesv1.CertificateSigningRequest, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	raw, err := x509.CreateCertificateRequest(rand.Reader, &p.request, key)
	if err != nil {
		return nil, err
	}
	csr := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "request-", Labels: map[string]string{"karmada.io/system": "true"}},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: raw}), SignerName: p.signer, Usages: p.usages, ExpirationSeconds: p.expirationSeconds,
		},
	}
	if p.id != "" {
		csr.Annotations = map[string]string{
			kube.AnnotationClusterID: p.id, kube.AnnotationUntil: time.Now().Add(waitTimeout).Format(time.RFC3339),
		}
	}
	return csr, nil
}

// decision is the decision about a request.
type decision struct {
	approved, denied bool
	message          string
	certificate      []byte
}

// readDecision reads the decision about a request.
func (w *world) readDecision(ctx context.Context, name string) (decision, error) {
	csr, err := kubernetes.NewForConfigOrDie(w.hub.Config).CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return decision{}, err
	}
	v := decision{certificate: csr.Status.Certificate}
	for _, condition := range csr.Status.Conditions {
		if condition.Status != corev1.ConditionTrue {
			continue
		}
		v.approved = v.approved || condition.Type == certificatesv1.CertificateApproved
		v.denied = v.denied || condition.Type == certificatesv1.CertificateDenied
		v.message += condition.Message
	}
	return v, nil
}

// awaitDecision waits until a request is approved or denied.
func (w *world) awaitDecision(name string) (decision, error) {
	var v decision
	err := wait.PollUntilContextTimeout(w.t.Context(), pollInterval/2, waitTimeout, true, func(ctx context.Context) (bool, error) {
		var err error
		v, err = w.readDecision(ctx, name)
		return v.approved || v.denied, err
	})
	return v, err
}

// wantDenied checks that a request is denied with a reason.
func (w *world) wantDenied(what string, config *rest.Config, p certificateRequest, reason string) {
	w.t.Helper()
	name, err := w.createRequest(config, p)
	if err != nil {
		w.t.Errorf("%s: %v", what, err)
		return
	}
	v, err := w.awaitDecision(name)
	switch {
	case err != nil:
		w.t.Errorf("%s: no decision: %v", what, err)
	case v.approved || len(v.certificate) > 0:
		w.t.Errorf("%s was approved: %+v", what, v)
	case !strings.Contains(v.message, reason):
		w.t.Errorf("%s was denied with %q, want %q", what, v.message, reason)
	}
}

// wantTokenRejected checks that a token is refused, also for a request.
func (w *world) wantTokenRejected(what, token string) {
	w.t.Helper()
	config := w.tokenConfig(token)
	_, err := kubernetes.NewForConfigOrDie(config).Discovery().ServerVersion()
	if !apierrors.IsUnauthorized(err) {
		w.t.Errorf("%s: the hub returns %v, want Unauthorized", what, err)
	}
	csr, err := validRequest("attacked", "00000000-0000-4000-8000-000000000003").csr()
	if err != nil {
		w.t.Fatal(err)
	}
	_, err = kubernetes.NewForConfigOrDie(config).CertificatesV1().CertificateSigningRequests().Create(w.t.Context(), csr, metav1.CreateOptions{})
	if !apierrors.IsUnauthorized(err) {
		w.t.Errorf("%s: a request returns %v, want Unauthorized", what, err)
	}
}

// wantUndecided checks that the hub has decided nothing about requests of other signers or other groups.
func (w *world) wantUndecided(names map[string]string) {
	w.t.Helper()
	for what, name := range names {
		if v, err := w.readDecision(w.t.Context(), name); err != nil || v.approved || v.denied || len(v.certificate) > 0 {
			w.t.Errorf("%s: got %+v and %v, want it undecided", what, v, err)
		}
	}
}

// forgedRequestCases are requests that must be denied, by their mistake, each with a text of the reason.
func forgedRequestCases(id string) map[string]struct {
	certificateRequest
	reason string
} {
	type forgery = struct {
		certificateRequest
		reason string
	}
	fresh := validRequest("fresh", id)
	server, _ := url.Parse("https://hub") // it is valid
	return map[string]forgery{
		"the reserved name": {validRequest("rbac-generator", id), "rbac-generator"},
		"no name":           {validRequest("", id), "name"},
		"a path for a name": {validRequest("../fresh", id), "name"},
		"an additional organisation": {fresh.with(func(p *certificateRequest) {
			p.request.Subject.Organization = []string{bootstrap.AgentsGroup, "developers"}
		}), "organization"},
		"no organisation":            {fresh.with(func(p *certificateRequest) { p.request.Subject.Organization = nil }), "organization"},
		"another organisation":       {fresh.with(func(p *certificateRequest) { p.request.Subject.Organization = []string{"developers"} }), "organization"},
		"an organisational unit":     {fresh.with(func(p *certificateRequest) { p.request.Subject.OrganizationalUnit = []string{"x"} }), "attribute"},
		"a DNS name":                 {fresh.with(func(p *certificateRequest) { p.request.DNSNames = []string{"hub"} }), "alternative names"},
		"an e-mail address":          {fresh.with(func(p *certificateRequest) { p.request.EmailAddresses = []string{"a@hub"} }), "alternative names"},
		"an IP address":              {fresh.with(func(p *certificateRequest) { p.request.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} }), "alternative names"},
		"a URI":                      {fresh.with(func(p *certificateRequest) { p.request.URIs = []*url.URL{server} }), "alternative names"},
		"an additional usage":        {fresh.with(func(p *certificateRequest) { p.usages = append(p.usages[:2:2], certificatesv1.UsageCertSign) }), "usages"},
		"a missing usage":            {fresh.with(func(p *certificateRequest) { p.usages = p.usages[1:] }), "usages"},
		"no id":                      {validRequest("fresh", ""), "kube-system"},
		"no expiration":              {fresh.with(func(p *certificateRequest) { p.expirationSeconds = nil }), "expirationSeconds"},
		"an expiration of ten years": {fresh.with(func(p *certificateRequest) { p.expirationSeconds = ptr.To[int32](10 * 365 * 24 * 3600) }), "expirationSeconds"},
		"an unknown name in O=":      {certificateRequest{request: x509.CertificateRequest{Subject: pkix.Name{CommonName: "admin", Organization: []string{bootstrap.AgentsGroup}}}, usages: fresh.usages, signer: fresh.signer, id: id, expirationSeconds: fresh.expirationSeconds}, "common name"},
	}
}

// wantTokenUnused checks that a token has registered no cluster.
func (w *world) wantTokenUnused(token bootstrap.Token) {
	w.t.Helper()
	secret := &corev1.Secret{}
	err := w.client(w.hub).Get(w.t.Context(), bootstrap.TokenSecret(token.ID), secret)
	if err == nil && secret.Annotations[kube.AnnotationRegistered] != "" {
		err = errors.New("it has registered " + secret.Annotations[kube.AnnotationRegistered])
	}
	if err != nil {
		w.t.Errorf("the token of all the attacks: %v", err)
	}
}
