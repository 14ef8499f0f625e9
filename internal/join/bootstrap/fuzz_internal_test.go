package bootstrap

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/cert"
	tokenapi "k8s.io/cluster-bootstrap/token/api"

	"github.com/towline/towline/test/fuzzing"
)

// FuzzSignature verifies a cluster-info that an attacker on the network can write. It must be accepted only if the
// token has signed it.
func FuzzSignature(f *testing.F) {
	token := Token{ID: "abcdef", Secret: "0123456789abcdef"}
	const kubeconfig = "apiVersion: v1\nkind: Config\nclusters: [{name: a, cluster: {server: https://a, certificate-authority-data: aGk=}}]\n"
	const head = "eyJhbGciOiJIUzI1NiIsImtpZCI6ImFiY2RlZiJ9"
	mac := hmac.New(sha256.New, []byte(token.Secret))
	mac.Write([]byte(head + "." + base64.RawURLEncoding.EncodeToString([]byte(kubeconfig))))
	signature := head + ".." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
	if token.signature(kubeconfig) != signature {
		f.Fatal("the signature is another one")
	}
	f.Add(kubeconfig, signature)
	f.Add(kubeconfig, "..")
	f.Add(kubeconfig, "eyJhbGciOiJub25lIiwia2lkIjoiYWJjZGVmIn0..")
	f.Add("clusters: []", signature)
	f.Fuzz(func(t *testing.T, text, given string) {
		info := &corev1.ConfigMap{Data: map[string]string{tokenapi.KubeConfigKey: text, tokenapi.JWSSignatureKeyPrefix + token.ID: given}}
		got, err := Discovery{Token: token}.verifySignature(info)
		fuzzing.OneLine(t, err)
		// The input cannot have a signature of another text: only the seed knows the secret.
		if err == nil && (got != kubeconfig || text != kubeconfig) {
			t.Errorf("the signature %q of another text is accepted: %q", given, text)
		}
		ca, err := caOfKubeconfig(text)
		fuzzing.OneLine(t, err)
		if err == nil && len(ca) == 0 {
			t.Error("an empty certificate authority")
		}
	})
}

// FuzzPins reads the pins of a command line, and certificate authorities.
func FuzzPins(f *testing.F) {
	f.Add("sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", []byte("-----BEGIN CERTIFICATE-----\naGk=\n-----END CERTIFICATE-----\n"))
	f.Add("sha1:aa", []byte(""))
	f.Fuzz(func(t *testing.T, text string, ca []byte) {
		pins, err := normalizePins([]string{text})
		fuzzing.OneLine(t, err)
		if again, againErr := normalizePins(pins); err == nil && (againErr != nil || again[0] != pins[0]) {
			t.Errorf("%q became %q, and that %q", text, pins, again)
		}
		authorities, err := cert.ParseCertsPEM(ca)
		if err == nil && len(pinnedAuthorities(authorities, pins)) > 0 && len(pins) == 0 {
			t.Error("an authority is pinned without a pin")
		}
	})
}
