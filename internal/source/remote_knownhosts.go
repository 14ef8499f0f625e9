package source

import (
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // the format of known_hosts
	"encoding/base64"
	"errors"
	"io"
	"path"
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
)

// parseKnownHosts returns the keys of a host in a known_hosts file, without revoked keys. address is "<host>:<port>".
// Lines with @cert-authority are ignored.
func parseKnownHosts(file []byte, address string) (hostKeys, error) {
	host := knownhosts.Normalize(address)
	var keys, revoked hostKeys
	for len(file) > 0 {
		marker, patterns, key, _, rest, err := ssh.ParseKnownHosts(file)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, errors.New("the key " + keyKnownHosts + " is not in the format of known_hosts")
		}
		file = rest
		switch {
		case marker == "revoked":
			revoked = append(revoked, key)
		case marker == "" && matchesHost(patterns, host):
			keys = append(keys, key)
		}
	}
	return slices.DeleteFunc(keys, revoked.contains), nil
}

// matchesHost returns whether a pattern matches the host, and no pattern that begins with an exclamation mark does.
func matchesHost(patterns []string, host string) bool {
	isMatch := false
	for _, pattern := range patterns {
		negated, isNegation := strings.CutPrefix(pattern, "!")
		switch {
		case isNegation && matchesPattern(negated, host):
			return false
		case !isNegation && matchesPattern(pattern, host):
			isMatch = true
		}
	}
	return isMatch
}

// matchesPattern returns whether a host matches a name, a pattern with * and ?, or a hashed name.
func matchesPattern(pattern, host string) bool {
	if hashed, ok := strings.CutPrefix(pattern, "|1|"); ok {
		encodedSalt, encodedHash, _ := strings.Cut(hashed, "|")
		salt, saltErr := base64.StdEncoding.DecodeString(encodedSalt)
		hash, hashErr := base64.StdEncoding.DecodeString(encodedHash)
		if saltErr != nil || hashErr != nil {
			return false
		}
		mac := hmac.New(sha1.New, salt)
		mac.Write([]byte(host))
		return hmac.Equal(mac.Sum(nil), hash)
	}
	if pattern == host {
		return true
	}
	// known_hosts has no character classes, but path.Match has.
	isMatch, err := path.Match(strings.NewReplacer("[", `\[`, "]", `\]`).Replace(pattern), host)
	return err == nil && isMatch
}
