package localkube

import (
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
)

// Authority returns what signs the certificates of the control plane and of its clients, read off its disk, so that a test can make certificates that
// Kubernetes would not: one that lives for seconds, or that has expired. It fails the test if the control plane has none.
func (p *Plane) Authority(t testing.TB) (*x509.Certificate, *ecdsa.PrivateKey) {
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
			t.Fatalf("%s holds no PEM", found[0])
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
