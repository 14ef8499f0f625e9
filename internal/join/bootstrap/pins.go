package bootstrap

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// pinPrefix names the one kind of pin there is: the SHA-256 of the public key as its certificate has it.
const pinPrefix = "sha256:"

// ErrNoCA says that a kubeconfig names no certificate authority that could be pinned.
var ErrNoCA = errors.New("no CA certificates found in kubeconfig")

// Pins returns "sha256:<hex>" of the public key of every certificate authority that the kubeconfig's current context trusts, inline or in a file.
func Pins(kubeconfig *clientcmdapi.Config) ([]string, error) {
	cluster, err := currentCluster(kubeconfig)
	if err != nil {
		return nil, err
	}
	ca := cluster.CertificateAuthorityData
	if len(ca) == 0 && cluster.CertificateAuthority != "" {
		if ca, err = os.ReadFile(cluster.CertificateAuthority); err != nil {
			return nil, fmt.Errorf("read certificate authority: %w", err)
		}
	}
	if len(ca) == 0 {
		return nil, ErrNoCA
	}
	return PinsOf(ca)
}

// RegisterLine returns the command that registers a cluster with t at the hub that the kubeconfig's current context leads to, as people type it.
// program is how they call us, such as "karmadactl". A token for one Cluster alone makes it a command that gives that Cluster a new identity.
func RegisterLine(program string, kubeconfig *clientcmdapi.Config, t Token) (string, error) {
	cluster, err := currentCluster(kubeconfig)
	if err != nil {
		return "", err
	}
	pins, err := Pins(kubeconfig)
	if err != nil {
		return "", err
	}
	endpoint := strings.TrimSuffix(strings.TrimPrefix(cluster.Server, "https://"), "/")
	line := fmt.Sprintf("%s register %s --token %s --discovery-token-ca-cert-hash %s", program, endpoint, t, strings.Join(pins, ","))
	if name, ok := OnlyFor(t.Groups); ok {
		line += " --cluster-name " + name + " --renew"
	}
	return line, nil
}

func currentCluster(kubeconfig *clientcmdapi.Config) (*clientcmdapi.Cluster, error) {
	if context := kubeconfig.Contexts[kubeconfig.CurrentContext]; context != nil {
		if cluster := kubeconfig.Clusters[context.Cluster]; cluster != nil {
			return cluster, nil
		}
	}
	return nil, errors.New("failed to get default cluster config")
}

// PinsOf returns "sha256:<hex>" of the public key of every certificate in ca, which is PEM.
func PinsOf(ca []byte) ([]string, error) {
	authorities, err := parseCertificates(ca)
	if err != nil {
		return nil, err
	}
	var pins []string
	for _, authority := range authorities {
		pins = append(pins, pinOf(authority))
	}
	return slices.Compact(pins), nil
}

func pinOf(certificate *x509.Certificate) string {
	sum := sha256.Sum256(certificate.RawSubjectPublicKeyInfo)
	return pinPrefix + hex.EncodeToString(sum[:])
}

// parseCertificates reads all certificates in text; there is at least one.
func parseCertificates(text []byte) ([]*x509.Certificate, error) {
	var certificates []*x509.Certificate
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("parse certificate: %w", err)
		}
		certificates = append(certificates, certificate)
	}
	if len(certificates) == 0 {
		return nil, errors.New("there is no certificate in PEM")
	}
	return certificates, nil
}

// readPins brings pins into one spelling, and refuses what is none.
func readPins(given []string) ([]string, error) {
	form := regexp.MustCompile(`^` + pinPrefix + `[0-9a-f]{64}$`)
	var pins []string
	for _, pin := range given {
		pin = strings.ToLower(strings.TrimSpace(pin))
		if !form.MatchString(pin) {
			return nil, fmt.Errorf("invalid CA certificate hash %q: it must be %q and 64 hexadecimal digits", pin, pinPrefix)
		}
		pins = append(pins, pin)
	}
	return pins, nil
}

// pinned returns those of the authorities whose public key is pinned.
func pinned(authorities []*x509.Certificate, pins []string) []*x509.Certificate {
	var kept []*x509.Certificate
	for _, authority := range authorities {
		if slices.Contains(pins, pinOf(authority)) {
			kept = append(kept, authority)
		}
	}
	return kept
}
