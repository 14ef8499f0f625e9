package bootstrap

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// pinPrefix names the one kind of pin there is: the SHA-256 of the public key as its certificate has it.
const pinPrefix = "sha256:"

// Pins returns "sha256:<hex>" of the public key of every certificate in ca, which is PEM.
func Pins(ca []byte) ([]string, error) {
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
