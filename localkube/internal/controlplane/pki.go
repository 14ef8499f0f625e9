package controlplane

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

// certificateLife is how long every certificate is valid. A data directory that is older must be thrown away.
const certificateLife = 10 * 365 * 24 * time.Hour

// serviceIP is the address of the Service "kubernetes": the first one of serviceRange.
const (
	serviceRange = "10.96.0.0/16"
	serviceIP    = "10.96.0.1"
)

// pki is a directory of PEM files: name.crt and name.key per certificate, sa.key for ServiceAccount tokens.
type pki struct {
	dir string
}

func (p pki) crt(name string) string { return filepath.Join(p.dir, name+".crt") }
func (p pki) key(name string) string { return filepath.Join(p.dir, name+".key") }

// openPKI returns the certificates in Dir/pki, made now if there are none yet. Certificates that were made for other addresses are an error.
func openPKI(opts Options) (pki, error) {
	p := pki{dir: filepath.Join(opts.Dir, "pki")}
	_, err := os.Stat(p.dir)
	if err == nil {
		return p, p.serves(opts.Advertise)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return p, fmt.Errorf("look for certificates: %w", err)
	}
	// A directory that is renamed into place is complete, whenever the process was killed.
	fresh := pki{dir: p.dir + ".new"}
	if err := os.RemoveAll(fresh.dir); err != nil {
		return p, fmt.Errorf("remove half-made certificates: %w", err)
	}
	if err := os.Mkdir(fresh.dir, 0o700); err != nil {
		return p, fmt.Errorf("make certificate directory: %w", err)
	}
	if err := fresh.issue(opts); err != nil {
		return p, fmt.Errorf("issue certificates: %w", err)
	}
	if err := os.Rename(fresh.dir, p.dir); err != nil {
		return p, fmt.Errorf("keep certificates: %w", err)
	}
	return p, nil
}

// serves returns an error unless the API server's certificate is good for the address.
func (p pki) serves(address net.IP) error {
	certs, err := cert.CertsFromFile(p.crt("apiserver"))
	if err != nil {
		return fmt.Errorf("read API server certificate: %w", err)
	}
	if err := certs[0].VerifyHostname(address.String()); err != nil {
		return fmt.Errorf("%s was made for another address: %w", filepath.Dir(p.dir), err)
	}
	return nil
}

func (p pki) issue(opts Options) error {
	name := opts.Name
	ca, err := p.authority("ca", name+"-ca")
	if err != nil {
		return err
	}
	frontProxy, err := p.authority("front-proxy-ca", name+"-front-proxy-ca")
	if err != nil {
		return err
	}
	err = p.leaf(ca, "apiserver", x509.Certificate{
		Subject:     pkix.Name{CommonName: "kube-apiserver"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback, net.ParseIP(serviceIP), opts.Bind, opts.Advertise},
		DNSNames: []string{"localhost", name, "kubernetes", "kubernetes.default", "kubernetes.default.svc",
			"kubernetes.default.svc.cluster.local"},
	})
	if err != nil {
		return err
	}
	clientAuth := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	err = p.leaf(ca, "admin", x509.Certificate{
		Subject:     pkix.Name{CommonName: "kubernetes-admin", Organization: []string{"system:masters"}},
		ExtKeyUsage: clientAuth,
	})
	if err != nil {
		return err
	}
	err = p.leaf(frontProxy, "front-proxy", x509.Certificate{
		Subject: pkix.Name{CommonName: "front-proxy-client"}, ExtKeyUsage: clientAuth,
	})
	if err != nil {
		return err
	}
	_, err = p.newKey("sa")
	return err
}

// authority is a certificate authority: its certificate and its key.
type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func (p pki) authority(file, commonName string) (authority, error) {
	key, err := p.newKey(file)
	if err != nil {
		return authority{}, err
	}
	crt, err := cert.NewSelfSignedCACert(cert.Config{CommonName: commonName}, key)
	if err != nil {
		return authority{}, fmt.Errorf("sign %s: %w", file, err)
	}
	return authority{cert: crt, key: key}, p.writeCert(file, crt.Raw)
}

func (p pki) leaf(by authority, file string, template x509.Certificate) error {
	key, err := p.newKey(file)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return fmt.Errorf("draw serial number: %w", err)
	}
	template.SerialNumber = serial
	template.NotBefore = by.cert.NotBefore
	template.NotAfter = time.Now().Add(certificateLife)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	raw, err := x509.CreateCertificate(rand.Reader, &template, by.cert, key.Public(), by.key)
	if err != nil {
		return fmt.Errorf("sign %s: %w", file, err)
	}
	return p.writeCert(file, raw)
}

func (p pki) newKey(file string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key %s: %w", file, err)
	}
	text, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		return nil, fmt.Errorf("encode key %s: %w", file, err)
	}
	if err := os.WriteFile(p.key(file), text, 0o600); err != nil {
		return nil, fmt.Errorf("write key %s: %w", file, err)
	}
	return key, nil
}

func (p pki) writeCert(file string, raw []byte) error {
	text, err := cert.EncodeCertificates(&x509.Certificate{Raw: raw})
	if err != nil {
		return fmt.Errorf("encode certificate %s: %w", file, err)
	}
	if err := os.WriteFile(p.crt(file), text, 0o600); err != nil {
		return fmt.Errorf("write certificate %s: %w", file, err)
	}
	return nil
}
