package bootstrap

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"strings"
)

// isSignedBy returns whether signature is a detached JWS of content, signed with the secret of t. It compares in
// constant time.
func isSignedBy(t Token, signature, content string) bool {
	head, rest, ok := strings.Cut(signature, ".")
	middle, tail, found := strings.Cut(rest, ".")
	if !ok || !found || middle != "" {
		return false
	}
	raw, err := base64.RawURLEncoding.DecodeString(head)
	if err != nil {
		return false
	}
	var header struct {
		Algorithm string `json:"alg"`
		Key       string `json:"kid"`
	}
	// The signer selects the algorithm, and only this one is accepted.
	if json.Unmarshal(raw, &header) != nil || header.Algorithm != "HS256" || header.Key != t.ID {
		return false
	}
	given, err := base64.RawURLEncoding.DecodeString(tail)
	if err != nil {
		return false
	}
	mac := hmac.New(sha256.New, []byte(t.Secret))
	// Writing to a hash never fails.
	_, _ = mac.Write([]byte(head + "." + base64.RawURLEncoding.EncodeToString([]byte(content))))
	return hmac.Equal(given, mac.Sum(nil))
}
