package bootstrap

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	tokenapi "k8s.io/cluster-bootstrap/token/api"
	tokenutil "k8s.io/cluster-bootstrap/token/util"
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
	if !tokenutil.IsValidBootstrapToken(text) {
		return Token{}, fmt.Errorf("the token is not of the form %q", tokenapi.BootstrapTokenPattern)
	}
	id, secret, _ := strings.Cut(text, ".")
	return Token{ID: id, Secret: secret}, nil
}

// String returns <id>.<secret>, as ParseToken reads it.
func (t Token) String() string { return t.ID + "." + t.Secret }

// secretData is the content of the token's Secret.
func (t Token) secretData() map[string][]byte {
	data := map[string][]byte{tokenapi.BootstrapTokenIDKey: []byte(t.ID), tokenapi.BootstrapTokenSecretKey: []byte(t.Secret)}
	if t.Description != "" {
		data[tokenapi.BootstrapTokenDescriptionKey] = []byte(t.Description)
	}
	if !t.Expires.IsZero() {
		data[tokenapi.BootstrapTokenExpirationKey] = []byte(t.Expires.UTC().Format(time.RFC3339))
	}
	for _, usage := range t.Usages {
		data[tokenapi.BootstrapTokenUsagePrefix+usage] = []byte("true")
	}
	if len(t.Groups) > 0 {
		data[tokenapi.BootstrapTokenExtraGroupsKey] = []byte(strings.Join(t.Groups, ","))
	}
	return data
}

// ReadToken returns the token in a Secret.
func ReadToken(secret *corev1.Secret) (Token, error) {
	t, err := ParseToken(string(secret.Data[tokenapi.BootstrapTokenIDKey]) + "." + string(secret.Data[tokenapi.BootstrapTokenSecretKey]))
	if err != nil {
		return Token{}, fmt.Errorf("bootstrap token has no valid %s or %s in secret: %s", tokenapi.BootstrapTokenIDKey, tokenapi.BootstrapTokenSecretKey, secret.Name)
	}
	if secret.Name != tokenutil.BootstrapTokenSecretName(t.ID) {
		return Token{}, fmt.Errorf("bootstrap token name is not of the form %q: %s", tokenapi.BootstrapTokenSecretPrefix+"<"+tokenapi.BootstrapTokenIDKey+">", secret.Name)
	}
	if text := string(secret.Data[tokenapi.BootstrapTokenExpirationKey]); text != "" {
		if t.Expires, err = time.Parse(time.RFC3339, text); err != nil {
			return Token{}, fmt.Errorf("can't parse expiration time of bootstrap token %q: %w", t.ID, err)
		}
	}
	t.Description = string(secret.Data[tokenapi.BootstrapTokenDescriptionKey])
	for key, value := range secret.Data {
		if usage, ok := strings.CutPrefix(key, tokenapi.BootstrapTokenUsagePrefix); ok && string(value) == "true" {
			t.Usages = append(t.Usages, usage)
		}
	}
	slices.Sort(t.Usages)
	if groups := string(secret.Data[tokenapi.BootstrapTokenExtraGroupsKey]); groups != "" {
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
