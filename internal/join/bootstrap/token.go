package bootstrap

import (
	"crypto/rand"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	tokenIDPattern = `[a-z0-9]{6}`
	tokenPattern   = tokenIDPattern + `\.[a-z0-9]{16}`
	// secretPrefix is the prefix of the name of a token's Secret in kube-system; the id of the token follows.
	secretPrefix = "bootstrap-token-"
	usagePrefix  = "usage-bootstrap-"
)

// Keys of the Secret of a token.
const (
	keyID          = "token-id"
	keySecret      = "token-secret"
	keyExpiration  = "expiration"
	keyDescription = "description"
	keyGroups      = "auth-extra-groups"
)

// Token is one bootstrap token.
type Token struct {
	// ID is public; Secret gives the permission to register a cluster.
	ID, Secret string
	// Description is for people.
	Description string
	// Expires is the time of expiry; zero for a token that does not expire.
	Expires time.Time
	// Usages are any of "signing" and "authentication", sorted.
	Usages []string
	// Groups are the groups of its holder, without the group that all bootstrap tokens have.
	Groups []string
}

// ParseToken reads <id>.<secret>. Its error does not quote the token.
func ParseToken(text string) (Token, error) {
	if !regexp.MustCompile(`^` + tokenPattern + `$`).MatchString(text) {
		return Token{}, fmt.Errorf("the token is not of the form %q", tokenPattern)
	}
	id, secret, _ := strings.Cut(text, ".")
	return Token{ID: id, Secret: secret}, nil
}

// String returns <id>.<secret>, as ParseToken reads it.
func (t Token) String() string { return t.ID + "." + t.Secret }

// newToken returns a random token.
func newToken() Token {
	text := strings.ToLower(rand.Text())
	return Token{ID: text[:6], Secret: text[6:22]}
}

// secretData is the content of the token's Secret.
func (t Token) secretData() map[string][]byte {
	data := map[string][]byte{keyID: []byte(t.ID), keySecret: []byte(t.Secret)}
	if t.Description != "" {
		data[keyDescription] = []byte(t.Description)
	}
	if !t.Expires.IsZero() {
		data[keyExpiration] = []byte(t.Expires.UTC().Format(time.RFC3339))
	}
	for _, usage := range t.Usages {
		data[usagePrefix+usage] = []byte("true")
	}
	if len(t.Groups) > 0 {
		data[keyGroups] = []byte(strings.Join(t.Groups, ","))
	}
	return data
}

// ReadToken returns the token in a Secret.
func ReadToken(secret *corev1.Secret) (Token, error) {
	t, err := ParseToken(string(secret.Data[keyID]) + "." + string(secret.Data[keySecret]))
	if err != nil {
		return Token{}, fmt.Errorf("bootstrap token has no valid %s or %s in secret: %s", keyID, keySecret, secret.Name)
	}
	if secret.Name != secretPrefix+t.ID {
		return Token{}, fmt.Errorf("bootstrap token name is not of the form %q: %s", secretPrefix+"<"+keyID+">", secret.Name)
	}
	if text := string(secret.Data[keyExpiration]); text != "" {
		if t.Expires, err = time.Parse(time.RFC3339, text); err != nil {
			return Token{}, fmt.Errorf("can't parse expiration time of bootstrap token %q: %w", t.ID, err)
		}
	}
	t.Description = string(secret.Data[keyDescription])
	for key, value := range secret.Data {
		if usage, ok := strings.CutPrefix(key, usagePrefix); ok && string(value) == "true" {
			t.Usages = append(t.Usages, usage)
		}
	}
	slices.Sort(t.Usages)
	if groups := string(secret.Data[keyGroups]); groups != "" {
		t.Groups = strings.Split(groups, ",")
	}
	return t, nil
}

// CheckUsable returns the reason why a token cannot be used for a registration at the time now, or nil.
func (t Token) CheckUsable(now time.Time) error {
	if !t.Expires.IsZero() && !now.Before(t.Expires) {
		return errors.New("the bootstrap token has expired")
	}
	if !slices.Contains(t.Usages, "authentication") {
		return errors.New("the bootstrap token is not for authentication")
	}
	return nil
}
