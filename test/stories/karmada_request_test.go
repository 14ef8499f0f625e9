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

// certificateRequest is a request for a certificate, as anybody may word it.
type certificateRequest struct {
	request x509.CertificateRequest
	usages  []certificatesv1.KeyUsage
	signer  string
	// id is what the request says is the cluster's.
	id string
	// life is spec.expirationSeconds, nil for the longest life of the signer.
	life *int32
}

// honest is the request of a cluster that registers.
func honest(cluster, id string) certificateRequest {
	return certificateRequest{
		request: x509.CertificateRequest{Subject: pkix.Name{CommonName: bootstrap.AgentUser(cluster), Organization: []string{bootstrap.AgentsGroup}}},
		usages:  []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		signer:  bootstrap.Signer,
		id:      id,
		life:    ptr.To[int32](3600),
	}
}

// but returns p with a change.
func (p certificateRequest) but(change func(p *certificateRequest)) certificateRequest {
	change(&p)
	return p
}

// bearer connects to the hub with a token and nothing else.
func (w *world) bearer(token string) *rest.Config {
	config := rest.AnonymousClientConfig(w.hub.Config)
	config.BearerToken, config.QPS = token, -1
	return config
}

// bootstrapToken makes a token, as an administrator of the hub.
func (w *world) bootstrapToken() bootstrap.Token {
	w.t.Helper()
	token, err := w.makeToken()
	if err != nil {
		w.t.Fatal(err)
	}
	return token
}

func (w *world) makeToken() (bootstrap.Token, error) {
	hub := w.client(w.hub)
	return bootstrap.CreateToken(w.t.Context(), hub, bootstrap.TokenOptions{TTL: time.Hour})
}

// files hands a certificateRequest in, with the credential of config, and returns the name of the request.
func (w *world) files(config *rest.Config, p certificateRequest) (string, error) {
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
		// An API server takes a moment to know a new token.
		return !apierrors.IsUnauthorized(last), nil
	})
	return csr.Name, errors.Join(err, last)
}

// csr is the object that a certificateRequest is handed in as.
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
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: raw}), SignerName: p.signer, Usages: p.usages, ExpirationSeconds: p.life,
		},
	}
	if p.id != "" {
		csr.Annotations = map[string]string{
			kube.AnnotationClusterID: p.id, kube.AnnotationUntil: time.Now().Add(waitTimeout).Format(time.RFC3339),
		}
	}
	return csr, nil
}

// decision is what became of a request.
type decision struct {
	approved, denied bool
	message          string
	certificate      []byte
}

// decision reads what became of a request so far.
func (w *world) decision(ctx context.Context, name string) (decision, error) {
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

// decided waits until a request is approved or denied.
func (w *world) decided(name string) (decision, error) {
	var v decision
	err := wait.PollUntilContextTimeout(w.t.Context(), pollInterval/2, waitTimeout, true, func(ctx context.Context) (bool, error) {
		var err error
		v, err = w.decision(ctx, name)
		return v.approved || v.denied, err
	})
	return v, err
}

// wantDenied checks that a certificateRequest is denied, for a reason.
func (w *world) wantDenied(what string, config *rest.Config, p certificateRequest, reason string) {
	w.t.Helper()
	name, err := w.files(config, p)
	if err != nil {
		w.t.Errorf("%s: %v", what, err)
		return
	}
	v, err := w.decided(name)
	switch {
	case err != nil:
		w.t.Errorf("%s: no decision: %v", what, err)
	case v.approved || len(v.certificate) > 0:
		w.t.Errorf("%s was approved: %+v", what, v)
	case !strings.Contains(v.message, reason):
		w.t.Errorf("%s was denied with %q, want %q", what, v.message, reason)
	}
}

// wantUnheard checks that a token opens nothing, not even for a request.
func (w *world) wantUnheard(what, token string) {
	w.t.Helper()
	config := w.bearer(token)
	_, err := kubernetes.NewForConfigOrDie(config).Discovery().ServerVersion()
	if !apierrors.IsUnauthorized(err) {
		w.t.Errorf("%s: the hub answers %v, want Unauthorized", what, err)
	}
	csr, err := honest("attacked", "00000000-0000-4000-8000-000000000003").csr()
	if err != nil {
		w.t.Fatal(err)
	}
	_, err = kubernetes.NewForConfigOrDie(config).CertificatesV1().CertificateSigningRequests().Create(w.t.Context(), csr, metav1.CreateOptions{})
	if !apierrors.IsUnauthorized(err) {
		w.t.Errorf("%s: a request is answered with %v, want Unauthorized", what, err)
	}
}

// wantIgnored checks that requests which are none of our business have been left to others.
func (w *world) wantIgnored(names map[string]string) {
	w.t.Helper()
	for what, name := range names {
		if v, err := w.decision(w.t.Context(), name); err != nil || v.approved || v.denied || len(v.certificate) > 0 {
			w.t.Errorf("%s: got %+v and %v, want it undecided", what, v, err)
		}
	}
}

// forgeries are requests that nobody may have, by what is wrong with each, and what is said about them.
func forgeries(id string) map[string]struct {
	certificateRequest
	reason string
} {
	type forgery = struct {
		certificateRequest
		reason string
	}
	fresh := honest("fresh", id)
	server, _ := url.Parse("https://hub") // it is one
	return map[string]forgery{
		"the reserved name": {honest("rbac-generator", id), "rbac-generator"},
		"no name":           {honest("", id), "name"},
		"a path for a name": {honest("../fresh", id), "name"},
		"an organisation more": {fresh.but(func(p *certificateRequest) {
			p.request.Subject.Organization = []string{bootstrap.AgentsGroup, "developers"}
		}), "organization"},
		"no organisation":          {fresh.but(func(p *certificateRequest) { p.request.Subject.Organization = nil }), "organization"},
		"another organisation":     {fresh.but(func(p *certificateRequest) { p.request.Subject.Organization = []string{"developers"} }), "organization"},
		"an organisational unit":   {fresh.but(func(p *certificateRequest) { p.request.Subject.OrganizationalUnit = []string{"x"} }), "attribute"},
		"a DNS name":               {fresh.but(func(p *certificateRequest) { p.request.DNSNames = []string{"hub"} }), "alternative names"},
		"an e-mail address":        {fresh.but(func(p *certificateRequest) { p.request.EmailAddresses = []string{"a@hub"} }), "alternative names"},
		"an IP address":            {fresh.but(func(p *certificateRequest) { p.request.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} }), "alternative names"},
		"a URI":                    {fresh.but(func(p *certificateRequest) { p.request.URIs = []*url.URL{server} }), "alternative names"},
		"a usage more":             {fresh.but(func(p *certificateRequest) { p.usages = append(p.usages[:2:2], certificatesv1.UsageCertSign) }), "usages"},
		"a usage less":             {fresh.but(func(p *certificateRequest) { p.usages = p.usages[1:] }), "usages"},
		"no id":                    {honest("fresh", ""), "kube-system"},
		"no life":                  {fresh.but(func(p *certificateRequest) { p.life = nil }), "expirationSeconds"},
		"a life of ten years":      {fresh.but(func(p *certificateRequest) { p.life = ptr.To[int32](10 * 365 * 24 * 3600) }), "expirationSeconds"},
		"the name of nobody in O=": {certificateRequest{request: x509.CertificateRequest{Subject: pkix.Name{CommonName: "admin", Organization: []string{bootstrap.AgentsGroup}}}, usages: fresh.usages, signer: fresh.signer, id: id, life: fresh.life}, "common name"},
	}
}

// wantUnspent checks that a token has registered nothing.
func (w *world) wantUnspent(token bootstrap.Token) {
	w.t.Helper()
	secret := &corev1.Secret{}
	err := w.client(w.hub).Get(w.t.Context(), bootstrap.TokenSecret(token.ID), secret)
	if err == nil && secret.Annotations[kube.AnnotationRegistered] != "" {
		err = errors.New("it says that it registered " + secret.Annotations[kube.AnnotationRegistered])
	}
	if err != nil {
		w.t.Errorf("the token of all the attacks: %v", err)
	}
}
