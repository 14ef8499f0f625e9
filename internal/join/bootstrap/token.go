package bootstrap

import (
	"crypto/rand"
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	tokenIDPattern = `[a-z0-9]{6}`
	tokenPattern   = tokenIDPattern + `\.[a-z0-9]{16}`
	tokenAlphabet  = "abcdefghijklmnopqrstuvwxyz0123456789"
	// secretPrefix and its id make the name of the Secret in kube-system that a token is in.
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
	// ID is public and names the token; Secret must not be told to anybody who may not register a cluster.
	ID, Secret string
	// Description is for people.
	Description string
	// Expires is when it stops to be worth anything; zero: never.
	Expires time.Time
	// Usages are any of "signing" and "authentication", sorted.
	Usages []string
	// Groups are those that its holder belongs to beside the one of all bootstrap tokens.
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

// newToken returns a token that nobody can guess.
func newToken() (Token, error) {
	id, err := randomText(6)
	if err != nil {
		return Token{}, err
	}
	secret, err := randomText(16)
	return Token{ID: id, Secret: secret}, err
}

func randomText(length int) (string, error) {
	text := make([]byte, length)
	for i := range text {
		n, err := rand.Int(rand.Reader, big.NewInt(int64(len(tokenAlphabet))))
		if err != nil {
			return "", fmt.Errorf("make a token: %w", err)
		}
		text[i] = tokenAlphabet[n.Int64()]
	}
	return string(text), nil
}

// data is the content of the token's Secret.
func (t Token) data() map[string][]byte {
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

// ReadToken reads a token off its Secret.
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

// Useless says why a token is not worth a registration at the moment now, or nil.
func (t Token) Useless(now time.Time) error {
	if !t.Expires.IsZero() && !now.Before(t.Expires) {
		return errors.New("the bootstrap token has expired")
	}
	if !slices.Contains(t.Usages, "authentication") {
		return errors.New("the bootstrap token is not for authentication")
	}
	return nil
}
