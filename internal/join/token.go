package join

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// renewalFraction is the fraction of a token's life after which it is renewed, so that there is time for retries.
const renewalFraction = 0.8

// Token is a bearer token with some of its claims. Issued, Expires and BoundTo are zero if the token is no JWT or does
// not expire.
type Token struct {
	Text    string
	Issued  time.Time
	Expires time.Time
	// BoundTo is the uid of the Secret to which the token is bound.
	BoundTo types.UID
	// Account is empty if the token is not a JWT of a ServiceAccount.
	Account client.ObjectKey
}

// ReadToken reads the claims of a token. It does not verify them: only the API server can.
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
	if qualifiedName, isAccount := strings.CutPrefix(claims.Subject, "system:serviceaccount:"); isAccount {
		t.Account.Namespace, t.Account.Name, _ = strings.Cut(qualifiedName, ":")
	}
	if claims.Expires <= claims.IssuedAt {
		return t
	}
	t.Issued, t.Expires = time.Unix(claims.IssuedAt, 0), time.Unix(claims.Expires, 0)
	t.BoundTo = claims.Bound.Secret.UID
	return t
}

// RenewAfter returns how long after its issue t is renewed. If t has no times, its life is requestedLife.
func (t Token) RenewAfter(requestedLife time.Duration) time.Duration {
	life := requestedLife
	if !t.Expires.IsZero() && !t.Issued.IsZero() {
		life = t.Expires.Sub(t.Issued)
	}
	return time.Duration(float64(life) * renewalFraction)
}
