package bootstrap_test

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzParseToken reads tokens that people type.
func FuzzParseToken(f *testing.F) {
	f.Add("abcdef.0123456789abcdef")
	f.Add("abcdef.0123456789ABCDEF")
	f.Add("abcdef.0123456789abcdef\n")
	f.Fuzz(func(t *testing.T, text string) {
		token, err := bootstrap.ParseToken(text)
		fuzzing.OneLine(t, err)
		fuzzing.HidesSecret(t, err, []byte(text), text)
		if err == nil && (token.String() != text || len(token.ID) != 6 || len(token.Secret) != 16) {
			t.Errorf("%q became %q", text, token)
		}
	})
}

// FuzzReadToken reads the Secrets of tokens.
func FuzzReadToken(f *testing.F) {
	f.Add("abcdef", "0123456789abcdef", "2026-01-01T00:00:00Z", "usage-bootstrap-authentication", "system:bootstrappers:a,b", "bootstrap-token-abcdef")
	f.Add("abcdef", "0123456789abcdef", "x", "", "", "bootstrap-token-abcdef")
	f.Fuzz(func(t *testing.T, id, text, expiration, key, groups, name string) {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string][]byte{
			"token-id": []byte(id), "token-secret": []byte(text), "expiration": []byte(expiration), "auth-extra-groups": []byte(groups),
		}}
		if _, isSet := secret.Data[key]; !isSet {
			secret.Data[key] = []byte("true")
		}
		token, err := bootstrap.ReadToken(secret)
		all := strings.Join([]string{id, text, expiration, key, groups, name}, "\n")
		fuzzing.HidesSecret(t, err, []byte(all), text)
		if err != nil {
			return
		}
		if token.ID != id || "bootstrap-token-"+id != name {
			t.Errorf("secret %q became token %q", name, token.ID)
		}
		if usable := token.CheckUsable(time.Now()); usable == nil && key != "usage-bootstrap-authentication" {
			t.Errorf("a token with the key %q is usable", key)
		}
	})
}
