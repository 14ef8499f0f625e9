package bootstrap_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/bootstrap"
)

// requestCertificate requests a certificate for cluster as an administrator, and calls answer with the request.
func requestCertificate(t *testing.T, cluster string, answer func(client.Client, *certificatesv1.CertificateSigningRequest) error) (bootstrap.Certificate, error) {
	t.Helper()
	plane, hubClient := hub(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for ctx.Err() == nil {
			var csrs certificatesv1.CertificateSigningRequestList
			if err := hubClient.List(ctx, &csrs); err != nil {
				continue
			}
			for i := range csrs.Items {
				if strings.HasPrefix(csrs.Items[i].Name, cluster+"-") {
					if err := answer(hubClient, &csrs.Items[i]); err != nil {
						t.Error(err)
					}
					return
				}
			}
		}
	}()
	certificate, err := bootstrap.RequestCertificate(ctx, plane.Config, bootstrap.CertificateRequest{Cluster: cluster, ID: "id", Lifetime: time.Hour, Until: time.Now().Add(15 * time.Second)})
	<-answered
	return certificate, err
}

func setCondition(hubClient client.Client, csr *certificatesv1.CertificateSigningRequest, decision certificatesv1.RequestConditionType) error {
	csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: decision, Status: "True", Reason: "Because", Message: "of that"}}
	return hubClient.SubResource("approval").Update(context.Background(), csr)
}

func TestRequestCertificateReturnsAnIdentity(t *testing.T) {
	t.Parallel()
	var request *certificatesv1.CertificateSigningRequest
	certificate, err := requestCertificate(t, "by-hand", func(hubClient client.Client, csr *certificatesv1.CertificateSigningRequest) error {
		request = csr
		return setCondition(hubClient, csr, certificatesv1.CertificateApproved)
	})
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(certificate.CertPEM)
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil || leaf.Subject.CommonName != "system:karmada:agent:by-hand" || !leaf.NotAfter.Equal(certificate.NotAfter) || certificate.CSR != request.Name {
		t.Errorf("certificate %+v, error %v", leaf.Subject, err)
	}
	until, err := time.Parse(time.RFC3339, request.Annotations["towline.dev/until"])
	if err != nil || time.Until(until) > 15*time.Second || request.Annotations["towline.dev/cluster-id"] != "id" || *request.Spec.ExpirationSeconds != 3600 {
		t.Errorf("request %+v, %v", request.ObjectMeta, err)
	}
}

func TestRequestCertificateReturnsTheDenial(t *testing.T) {
	t.Parallel()
	_, err := requestCertificate(t, "unwanted", func(hubClient client.Client, csr *certificatesv1.CertificateSigningRequest) error {
		return setCondition(hubClient, csr, certificatesv1.CertificateDenied)
	})
	var denied *bootstrap.DeniedError
	if !errors.As(err, &denied) || denied.Reason != "Because" || err.Error() != "of that" {
		t.Errorf("error %v", err)
	}
}

func TestRequestCertificateRejectsAnotherCertificate(t *testing.T) {
	t.Parallel()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		Subject: pkix.Name{CommonName: "system:karmada:agent:swapped", Organization: []string{"system:karmada:agents"}},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	_, err = requestCertificate(t, "swapped", func(hubClient client.Client, csr *certificatesv1.CertificateSigningRequest) error {
		csr.Status.Certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
		return hubClient.Status().Update(context.Background(), csr)
	})
	if err == nil || !strings.Contains(err.Error(), "private key does not match public key") {
		t.Errorf("error %v", err)
	}
}

func TestRequestCertificateEndsInTime(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	told := ""
	_, err := bootstrap.RequestCertificate(t.Context(), plane.Config, bootstrap.CertificateRequest{
		Cluster: "forgotten", ID: "id", Until: time.Now().Add(6500 * time.Millisecond), Progress: func(text string) { told = text },
	})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "it is not approved yet") {
		t.Errorf("error %v", err)
	}
	if !strings.Contains(told, "kubectl get csr forgotten-") {
		t.Errorf("told %q", told)
	}
}
