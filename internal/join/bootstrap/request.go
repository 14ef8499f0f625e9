package bootstrap

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	certificatesclient "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/utils/ptr"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// pollInterval is the time between two reads of the CertificateSigningRequest.
	pollInterval = time.Second
	// readsBeforeProgress is the number of reads before Progress is called.
	readsBeforeProgress = 5
)

// MaxLife is the longest life of an agent's certificate that the hub approves. It is the default of karmadactl and of
// the signer of Kubernetes.
const MaxLife = 365 * 24 * time.Hour

// CertificateRequest is a request for the certificate of an agent.
type CertificateRequest struct {
	// Cluster is the name of the agent's Cluster.
	Cluster string
	// ID is the uid of the cluster's namespace kube-system. It is empty for the next certificate of a registered agent.
	ID string
	// Lifetime is the requested lifetime, at least ten minutes. Default: MaxLife.
	Lifetime time.Duration
	// Until is the end of the wait. The hub does not approve the request later. Default: the deadline of the context.
	Until time.Time
	// Progress is called with the reason for a long wait. It may be nil.
	Progress func(string)
}

// Certificate is an agent's certificate.
type Certificate struct {
	// CertPEM is the certificate with its chain; KeyPEM is the key, which only this process has.
	CertPEM, KeyPEM []byte
	// NotBefore and NotAfter are the bounds of its validity.
	NotBefore, NotAfter time.Time
	// CSR is the name of the CertificateSigningRequest.
	CSR string
}

// DeniedError is returned for a request that the hub denied.
type DeniedError struct {
	// Reason is one of the Reason constants, or a reason of another approver.
	Reason string
	// Message is for people.
	Message string
}

func (d *DeniedError) Error() string { return d.Message }

// Reasons of the approval or denial of a CertificateSigningRequest.
const (
	ReasonApproved        = "AutoApproved"
	ReasonInvalidRequest  = "InvalidRequest"  // no agent may have such a certificate
	ReasonForbidden       = "Forbidden"       // the requester has no permission for such a request
	ReasonInvalidToken    = "InvalidToken"    // the token has expired or does not exist
	ReasonTokenSpent      = "TokenSpent"      // the token has registered another cluster
	ReasonClusterTaken    = "ClusterTaken"    // the name or the id is another cluster's
	ReasonClusterNotFound = "ClusterNotFound" // the Cluster does not exist
	ReasonTooLate         = "TooLate"         // the requester does not wait any more
	ReasonTooManyRequests = "TooManyRequests" // the requester has too many other requests
)

// RequestCertificate generates a key, requests a certificate for it from the hub of cfg, and waits until it is issued.
// It verifies that the certificate is for this key. It returns *DeniedError if the hub denies the request.
//
// The key is on the curve P-256: as strong as RSA-3072, and fast to generate on small machines.
func RequestCertificate(ctx context.Context, cfg *rest.Config, r CertificateRequest) (Certificate, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.Timeout = requestTimeout
	clientset, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return Certificate{}, fmt.Errorf("connect to the hub: %w", err)
	}
	if !r.Until.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, r.Until)
		defer cancel()
	}
	key, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return Certificate{}, fmt.Errorf("make a key: %w", err)
	}
	csrs := clientset.CertificatesV1().CertificateSigningRequests()
	name, err := r.createCSR(ctx, csrs, key)
	if err != nil {
		return Certificate{}, fmt.Errorf("ask for a certificate: %w", err)
	}
	issued, err := r.awaitCertificate(ctx, csrs, name)
	if err != nil {
		return Certificate{}, err
	}
	pair, err := tls.X509KeyPair(issued, key)
	if err != nil {
		return Certificate{}, fmt.Errorf("check the certificate of CertificateSigningRequest %s: %w", name, err)
	}
	return Certificate{CertPEM: issued, KeyPEM: key, NotBefore: pair.Leaf.NotBefore, NotAfter: pair.Leaf.NotAfter, CSR: name}, nil
}

// createCSR creates the CertificateSigningRequest and returns its name.
func (r CertificateRequest) createCSR(ctx context.Context, csrs certificatesclient.CertificateSigningRequestInterface, keyPEM []byte) (string, error) {
	key, err := keyutil.ParsePrivateKeyPEM(keyPEM)
	if err != nil {
		return "", err
	}
	request, err := cert.MakeCSR(key, &pkix.Name{CommonName: AgentUser(r.Cluster), Organization: []string{AgentsGroup}}, nil, nil)
	if err != nil {
		return "", err
	}
	csr := &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: r.Cluster + "-", Labels: map[string]string{clusterv1alpha1.SystemLabel: "true"}, Annotations: map[string]string{},
		},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:           request,
			SignerName:        Signer,
			ExpirationSeconds: ptr.To(int32(cmp.Or(r.Lifetime, MaxLife) / time.Second)),
			Usages:            []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}
	if r.ID != "" {
		csr.Annotations[kube.AnnotationClusterID] = r.ID
	}
	if deadline, ok := ctx.Deadline(); ok {
		csr.Annotations[kube.AnnotationUntil] = deadline.UTC().Format(time.RFC3339)
	}
	created, err := csrs.Create(ctx, csr, metav1.CreateOptions{FieldManager: kube.FieldManager})
	if err != nil {
		return "", err
	}
	return created.Name, nil
}

// awaitCertificate waits for the certificate and returns it in PEM. It ignores Forbidden: the hub creates the RBAC for
// the requester's reads after the request (EnsureCSRReadRBAC).
func (r CertificateRequest) awaitCertificate(ctx context.Context, csrs certificatesclient.CertificateSigningRequestInterface, name string) ([]byte, error) {
	var certificate []byte
	reads, last := 0, errors.New("the hub has not answered yet")
	err := wait.PollUntilContextCancel(ctx, pollInterval, false, func(ctx context.Context) (bool, error) {
		if reads++; reads == readsBeforeProgress && r.Progress != nil {
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
		return len(certificate) > 0, denialOrFailure(csr)
	})
	var denied *DeniedError
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

// denialOrFailure returns an error if the request was denied, or its signer failed.
func denialOrFailure(csr *certificatesv1.CertificateSigningRequest) error {
	for _, condition := range csr.Status.Conditions {
		switch condition.Type {
		case certificatesv1.CertificateDenied:
			return &DeniedError{Reason: condition.Reason, Message: condition.Message}
		case certificatesv1.CertificateFailed:
			return fmt.Errorf("the signer failed: %s", condition.Message)
		}
	}
	return nil
}
