package localkube_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/localkube"
)

// TestExpiredCertificateRequestIsCleanedUp restarts the plane, because the cleaner runs at the start and then every
// hour.
func TestExpiredCertificateRequestIsCleanedUp(t *testing.T) {
	t.Parallel()
	p := localkube.ForTest(t, localkube.Named("cleaner"))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	subject := pkix.Name{CommonName: "someone"}
	raw, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, key)
	if err != nil {
		t.Fatal(err)
	}
	expired := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: subject, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(-time.Hour),
	}
	certificate, err := x509.CreateCertificate(rand.Reader, expired, expired, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	requests := clientOf(p).CertificatesV1().CertificateSigningRequests()
	for _, name := range []string{"expired", "pending"} {
		request, err := requests.Create(t.Context(), &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: raw}),
				SignerName: "example.com/nobody", // no controller signs it, so the certificate stays ours
				Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
			},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if name == "pending" {
			continue
		}
		request.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
			{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test"},
		}
		if request, err = requests.UpdateApproval(t.Context(), name, request, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		request.Status.Certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})
		if _, err = requests.UpdateStatus(t.Context(), request, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := p.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	requests = clientOf(p).CertificatesV1().CertificateSigningRequests()
	eventually(t, "the expired request is deleted", func(ctx context.Context) (bool, string) {
		_, err := requests.Get(ctx, "expired", metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
	if _, err := requests.Get(t.Context(), "pending", metav1.GetOptions{}); err != nil {
		t.Errorf("a new pending request must stay: %v", err)
	}
}
