package localkube

import (
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
)

// CertificateAuthority returns the CA certificate and key of the control plane. With it, a test can issue certificates
// that Kubernetes does not issue, for example expired ones.
func (p *Plane) CertificateAuthority(t testing.TB) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	read := func(name string) []byte {
		found, err := filepath.Glob(filepath.Join(p.Dir, "*", name))
		if err != nil || len(found) != 1 {
			t.Fatalf("%s of control plane %s: %q, %v", name, p.Name, found, err)
		}
		text, err := os.ReadFile(found[0])
		if err != nil {
			t.Fatal(err)
		}
		block, _ := pem.Decode(text)
		if block == nil {
			t.Fatalf("%s has no PEM block", found[0])
		}
		return block.Bytes
	}
	certificate, err := x509.ParseCertificate(read("ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.ParseECPrivateKey(read("ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	return certificate, key
}
