package join

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// renewalFraction is the fraction of a token's life after which it is renewed. The rest is for retries while the API
// server is unavailable.
const renewalFraction = 0.8

// Token is a bearer token, with the claims that this package uses. The times and BoundTo are zero if the token is no
// JWT, or if it does not expire.
type Token struct {
	Text    string
	Issued  time.Time
	Expires time.Time
	// BoundTo is the uid of the Secret to which the token is bound, "" for none.
	BoundTo types.UID
	// Account is the ServiceAccount of the token, empty if the token is no JWT of one.
	Account client.ObjectKey
}

// serviceAccountUser is the prefix of the user name of a ServiceAccount.
const serviceAccountUser = "system:serviceaccount:"

// ReadToken reads the claims of a ServiceAccount token without verification, which only its API server can do. The
// claims are used to schedule renewals.
func ReadToken(text string) Token {
	t := Token{Text: text}
	parts := strings.Split(text, ".")
	if len(parts) != 3 {
		return t
	}
	raw, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return t
	}
	claims := struct {
		Subject  string `json:"sub"`
		IssuedAt int64  `json:"iat"`
		Expires  int64  `json:"exp"`
		Bound    struct {
			Secret struct {
				UID types.UID `json:"uid"`
			} `json:"secret"`
		} `json:"kubernetes.io"`
	}{}
	if json.Unmarshal(raw, &claims) != nil {
		return t
	}
	if qualifiedName, isAccount := strings.CutPrefix(claims.Subject, serviceAccountUser); isAccount {
		t.Account.Namespace, t.Account.Name, _ = strings.Cut(qualifiedName, ":")
	}
	if claims.Expires <= claims.IssuedAt {
		return t
	}
	t.Issued, t.Expires = time.Unix(claims.IssuedAt, 0), time.Unix(claims.Expires, 0)
	t.BoundTo = claims.Bound.Secret.UID
	return t
}

// UntilRenewal returns the time from the issue of t until its renewal. requestedLife is for a token without
// times.
func (t Token) UntilRenewal(requestedLife time.Duration) time.Duration {
	return time.Duration(float64(t.life(requestedLife)) * renewalFraction)
}

// life returns the time from the issue of t until it expires, or requestedLife if t has no times.
func (t Token) life(requestedLife time.Duration) time.Duration {
	if t.Expires.IsZero() || t.Issued.IsZero() {
		return requestedLife
	}
	return t.Expires.Sub(t.Issued)
}
