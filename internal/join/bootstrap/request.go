package bootstrap

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilrand "k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	certificatesclient "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// DefaultCertificateLife is the life that is asked for unless people say otherwise: that of the Karmada surface. The
	// hub may give less.
	DefaultCertificateLife = 365 * 24 * time.Hour
	// issuePoll is the time between two looks for the answer.
	issuePoll = time.Second
	// patience is how many looks pass before people are told what they could do.
	patience = 5
	// nameTries is how many names are tried before one that is not taken counts as unfindable.
	nameTries = 5
)

// CertificateRequest says which certificate is asked for.
type CertificateRequest struct {
	// Cluster is the name of the Cluster whose agent it is for.
	Cluster string
	// ID is the uid of that cluster's namespace kube-system; empty for an agent that asks for its next certificate.
	ID string
	// Life to ask for, in whole seconds and no less than ten minutes. Default: DefaultCertificateLife.
	Life time.Duration
	// Until is how long the answer is waited for: the hub does not give one later. Default: the end of the context.
	Until time.Time
	// Progress is told, for people, what is waited for. Default: nobody.
	Progress func(string)
}

// Certificate is an agent's identity.
type Certificate struct {
	// CertPEM is the certificate with what came with it; KeyPEM is the key, which has never left this process.
	CertPEM, KeyPEM []byte
	// NotBefore and NotAfter bound its life.
	NotBefore, NotAfter time.Time
	// CSR is the name of the request on the hub.
	CSR string
}

// Denied says that the hub refused a certificate. Its text is the hub's message alone.
type Denied struct {
	// Reason is one of the Reason constants here, or whatever somebody else who denied it wrote.
	Reason string
	// Message is for people.
	Message string
}

// Error returns the message.
func (d *Denied) Error() string { return d.Message }

// Reasons of an answer to a CertificateSigningRequest.
const (
	ReasonApproved  = "AutoApproved"
	ReasonMalformed = "InvalidRequest"  // it asks for what no agent may have
	ReasonForbidden = "Forbidden"       // the requester may not ask for that
	ReasonToken     = "InvalidToken"    // the token has expired or is gone
	ReasonSpent     = "TokenSpent"      // the token has registered another cluster
	ReasonTaken     = "ClusterTaken"    // the name or the id is another cluster's
	ReasonUnknown   = "ClusterNotFound" // there is no such cluster to renew the certificate of
	ReasonTooLate   = "TooLate"         // nobody waits for the answer any more
	ReasonTooMany   = "TooManyRequests" // the requester has too many others that wait or are approved
)

// RequestCertificate makes a key, asks the hub of cfg for a certificate for it, and waits for that. It returns *Denied
// if the hub refuses, and otherwise only an identity that is for this key and this agent.
//
// The key is an elliptic one (P-256), for registration and renewal alike: as strong as RSA-3072, and made in no time on
// the smallest of machines.
func RequestCertificate(ctx context.Context, cfg *rest.Config, r CertificateRequest) (Certificate, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.Timeout = askLimit
	clientset, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return Certificate{}, fmt.Errorf("connect to the hub: %w", err)
	}
	if !r.Until.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, r.Until)
		defer cancel()
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Certificate{}, fmt.Errorf("make a key: %w", err)
	}
	csrs := clientset.CertificatesV1().CertificateSigningRequests()
	name, err := r.submit(ctx, csrs, key)
	if err != nil {
		return Certificate{}, fmt.Errorf("ask for a certificate: %w", err)
	}
	issued, err := r.await(ctx, csrs, name)
	if err != nil {
		return Certificate{}, err
	}
	made, err := r.check(issued, key)
	if err != nil {
		return Certificate{}, fmt.Errorf("check the certificate of CertificateSigningRequest %s: %w", name, err)
	}
	made.CSR = name
	return made, nil
}

// submit creates the request and returns its name.
func (r CertificateRequest) submit(ctx context.Context, csrs certificatesclient.CertificateSigningRequestInterface, key *ecdsa.PrivateKey) (string, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: AgentUser(r.Cluster), Organization: []string{AgentsGroup}},
	}, key)
	if err != nil {
		return "", err
	}
	life := r.Life
	if life == 0 {
		life = DefaultCertificateLife
	}
	csr := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{clusterv1alpha1.SystemLabel: "true"}, Annotations: map[string]string{}},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:           pem.EncodeToMemory(&pem.Block{Type: requestType, Bytes: der}),
			SignerName:        Signer,
			ExpirationSeconds: ptr.To(int32(life / time.Second)),
			Usages:            []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}
	if r.ID != "" {
		csr.Annotations[kube.AnnotationClusterID] = r.ID
	}
	if deadline, ok := ctx.Deadline(); ok {
		csr.Annotations[kube.AnnotationUntil] = deadline.UTC().Format(time.RFC3339)
	}
	for range nameTries {
		csr.Name = r.Cluster + "-" + utilrand.String(5)
		if _, err = csrs.Create(ctx, csr, metav1.CreateOptions{FieldManager: kube.FieldManager}); !apierrors.IsAlreadyExists(err) {
			break
		}
	}
	return csr.Name, err
}

// await returns the certificate, in PEM, once it is issued. Until the hub has let us, we may not even look.
func (r CertificateRequest) await(ctx context.Context, csrs certificatesclient.CertificateSigningRequestInterface, name string) ([]byte, error) {
	var certificate []byte
	looks, last := 0, errors.New("nobody has answered yet")
	err := wait.PollUntilContextCancel(ctx, issuePoll, false, func(ctx context.Context) (bool, error) {
		if looks++; looks == patience && r.Progress != nil {
			r.Progress(fmt.Sprintf("waiting for the hub to approve CertificateSigningRequest %s; see it with: kubectl get csr %s", name, name))
		}
		csr, err := csrs.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsUnauthorized(err) || apierrors.IsNotFound(err) {
			return false, err
		}
		if err != nil {
			if !apierrors.IsForbidden(err) && ctx.Err() == nil {
				last = err
			}
			return false, nil
		}
		certificate, last = csr.Status.Certificate, errors.New("it is approved and not signed yet")
		if len(csr.Status.Conditions) == 0 {
			last = errors.New("it is not approved yet")
		}
		return len(certificate) > 0, refused(csr)
	})
	var denied *Denied
	switch {
	case err == nil:
		return certificate, nil
	case errors.As(err, &denied):
		return nil, denied
	case ctx.Err() != nil:
		return nil, fmt.Errorf("wait for the certificate of CertificateSigningRequest %s: %w: %w", name, ctx.Err(), last)
	}
	return nil, fmt.Errorf("wait for the certificate of CertificateSigningRequest %s: %w", name, err)
}

// refused says why there will be no certificate, if there will be none.
func refused(csr *certificatesv1.CertificateSigningRequest) error {
	for _, condition := range csr.Status.Conditions {
		switch condition.Type {
		case certificatesv1.CertificateDenied:
			return &Denied{Reason: condition.Reason, Message: condition.Message}
		case certificatesv1.CertificateFailed:
			return fmt.Errorf("the signer failed: %s", condition.Message)
		}
	}
	return nil
}

// check makes an identity of what was issued, if it is what was asked for.
func (r CertificateRequest) check(issued []byte, key *ecdsa.PrivateKey) (Certificate, error) {
	certificates, err := parseCertificates(issued)
	if err != nil {
		return Certificate{}, err
	}
	leaf := certificates[0]
	if !key.PublicKey.Equal(leaf.PublicKey) {
		return Certificate{}, errors.New("it is for another key")
	}
	if leaf.Subject.CommonName != AgentUser(r.Cluster) || len(leaf.Subject.Organization) != 1 || leaf.Subject.Organization[0] != AgentsGroup {
		return Certificate{}, fmt.Errorf("it is for %s", leaf.Subject)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return Certificate{}, err
	}
	return Certificate{
		CertPEM:   issued,
		KeyPEM:    pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		NotBefore: leaf.NotBefore,
		NotAfter:  leaf.NotAfter,
	}, nil
}
