package source

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"

	corev1 "k8s.io/api/core/v1"

	"github.com/towline/towline/internal/phase"
)

// The keys of the Secret of a remote source. The Secrets of Flux have bearerToken and ca.crt in place of token and
// caFile.
const (
	keyToken       = "token"
	keyBearerToken = "bearerToken"
	keyCAFile      = "caFile"
	keyCACert      = "ca.crt"
	keyIdentity    = "identity"
	keyKnownHosts  = "known_hosts"
)

// remoteLogin has the credentials and the transport options for a remote source.
type remoteLogin struct {
	Login
	// Token is sent as a bearer token.
	Token string
	// Identity is a private SSH key in PEM, which Password decrypts, and KnownHosts has the keys of SSH hosts.
	Identity, KnownHosts []byte
}

// digest identifies the login, without its secrets.
func (l remoteLogin) digest() string {
	raw, _ := json.Marshal(l) // cannot fail for strings, bytes and bools
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// hasCredentials returns whether the login has a token, a user name, a password or an SSH key.
func (l remoteLogin) hasCredentials() bool {
	return l.Token != "" || l.Username != "" || l.Password != "" || len(l.Identity) > 0
}

// authorize adds the credentials to a request.
func (l remoteLogin) authorize(request *http.Request) {
	if l.Token != "" {
		request.Header.Set("Authorization", "Bearer "+l.Token)
	} else if l.Username != "" || l.Password != "" {
		request.SetBasicAuth(l.Username, l.Password)
	}
}

// readLogin reads the login for a URL from its Secret. It fails with a loginError if the Secret cannot be read, and
// with phase.TerminalError if it has no login or the login must not be sent to the URL.
func (f *RemoteFetcher) readLogin(ctx context.Context, ref Reference) (remoteLogin, error) {
	login := remoteLogin{Login: Login{InsecureSkipTLSVerify: ref.InsecureSkipTLSVerify, PlainHTTP: ref.PlainHTTP}}
	if _, hasLogin := ref.LoginSecret(); !hasLogin {
		return login, nil
	}
	// ResolveRemoteSource has checked the namespace.
	secret, err := readSecret(ctx, f.hub, ref.secretRef(), TemplateContext{})
	if err != nil {
		return remoteLogin{}, &loginError{err: fmt.Errorf("login for %s: %w", ref, err)}
	}
	login.Token = string(firstNonEmpty(secret.Data, keyToken, keyBearerToken))
	login.Username = string(secret.Data[corev1.BasicAuthUsernameKey])
	login.Password = string(secret.Data[corev1.BasicAuthPasswordKey])
	login.CA = firstNonEmpty(secret.Data, keyCAFile, keyCACert)
	login.Identity, login.KnownHosts = secret.Data[keyIdentity], secret.Data[keyKnownHosts]
	// An SSH key is not sent, but it needs the same check: its repositories are deployed to clusters that the profile's
	// author can read.
	if login.Token != "" || login.Username != "" || login.Password != "" || len(login.Identity) > 0 {
		if login.Hosts, err = allowedHostsFor(secret, ref.URL); err != nil {
			return remoteLogin{}, phase.TerminalErrorf("login for %s: Secret %s/%s: %w", ref, secret.Namespace, secret.Name, err)
		}
	}
	if !login.hasCredentials() && len(login.CA) == 0 {
		return remoteLogin{}, phase.TerminalErrorf("login for %s: Secret %s/%s has none of the keys %s, %s and %s, %s, %s", ref, secret.Namespace, secret.Name,
			keyToken, corev1.BasicAuthUsernameKey, corev1.BasicAuthPasswordKey, keyIdentity, keyCAFile)
	}
	return login, nil
}

// loginError is the error of a missing Secret. It hides ErrNotFound: only the content of a URL can be optional.
type loginError struct{ err error }

func (e *loginError) Error() string { return e.err.Error() }

// firstNonEmpty returns the value of the first key whose value is not empty.
func firstNonEmpty(data map[string][]byte, keys ...string) []byte {
	var found string
	for _, key := range keys {
		found = cmp.Or(found, string(data[key]))
	}
	return []byte(found)
}
