package bootstrap

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/client-go/util/cert"
)

// pinPrefix is the prefix of all pins: the SHA-256 of the public key as it is in its certificate.
const pinPrefix = "sha256:"

// Pins returns "sha256:<hex>" of the public key of every certificate in ca, which is PEM.
func Pins(ca []byte) ([]string, error) {
	authorities, err := cert.ParseCertsPEM(ca)
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

// normalizePins returns pins in lower case, or an error for an invalid one.
func normalizePins(given []string) ([]string, error) {
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

// pinnedAuthorities returns the authorities whose public key is pinned.
func pinnedAuthorities(authorities []*x509.Certificate, pins []string) []*x509.Certificate {
	var pinned []*x509.Certificate
	for _, authority := range authorities {
		if slices.Contains(pins, pinOf(authority)) {
			pinned = append(pinned, authority)
		}
	}
	return pinned
}
