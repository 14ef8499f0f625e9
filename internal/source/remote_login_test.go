package source_test

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestRemoteLogin(t *testing.T) {
	t.Parallel()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, in *http.Request) {
		user, password, _ := in.BasicAuth()
		if in.Header.Get("Authorization") != "Bearer right" && user+password != "meright" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = w.Write([]byte("a: b"))
	}))
	t.Cleanup(server.Close)
	ca := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	for name, test := range map[string]struct {
		secret map[string]string
		want   string
	}{
		"token":             {secret: map[string]string{"token": "right", "caFile": ca}},
		"password":          {secret: map[string]string{"username": "me", "password": "right", "caFile": ca}},
		"names of Flux":     {secret: map[string]string{"bearerToken": "right", "ca.crt": ca}},
		"wrong token":       {secret: map[string]string{"token": "wrong", "caFile": ca}, want: "401 Unauthorized"},
		"no CA":             {secret: map[string]string{"token": "right"}, want: "certificate signed by unknown authority"},
		"CA is not PEM":     {secret: map[string]string{"caFile": "text"}, want: "CA is not PEM"},
		"no key for it":     {secret: map[string]string{"other": "right"}, want: "has none of the keys token, username"},
		"only an authority": {secret: map[string]string{"caFile": ca}, want: "401 Unauthorized"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRemoteRun(t)
			r.secrets.set("login", test.secret)
			got, err := r.read(withSecret(remoteRef(server.URL), "login"))
			if test.want == "" && (err != nil || !got.Sensitive) {
				t.Errorf("error %v, sensitive %t", err, got.Sensitive)
			}
			if test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "right")) {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
}

// TestSecretsOfOthersAreNotSent uses Secrets for other servers, with the key token.
func TestSecretsOfOthersAreNotSent(t *testing.T) {
	t.Parallel()
	var requests atomic.Int32
	server := serveFunc(t, func(http.ResponseWriter, *http.Request) { requests.Add(1) })
	for _, secretType := range []corev1.SecretType{corev1.SecretTypeServiceAccountToken, corev1.SecretTypeBootstrapToken} {
		r := newRemoteRun(t)
		r.secrets.set("login", map[string]string{"token": "private"})
		r.secrets.secretType = secretType
		_, err := r.read(withSecret(remoteRef(server.URL), "login"))
		wantInvalid(t, err, `Secret eu/login: it has the type "`+string(secretType)+`", so its login is not sent to servers`)
		if strings.Contains(err.Error(), "private") || requests.Load() > 0 {
			t.Errorf("%s: %v, and %d requests", secretType, err, requests.Load())
		}
	}
}
