package join

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"
)

// renewAt is the part of a token's life after which it is renewed: early enough for many attempts while the hub is away.
const renewAt = 0.8

// token is a bearer token and what it says of its own life. The times are zero if it says nothing.
type token struct {
	text    string
	issued  time.Time
	expires time.Time
}

// readToken reads the life of a ServiceAccount token. Only the hub can and does verify it; here it is for planning.
func readToken(text string) token {
	t := token{text: text}
	parts := strings.Split(text, ".")
	if len(parts) != 3 {
		return t
	}
	raw, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return t
	}
	claims := struct {
		IssuedAt int64 `json:"iat"`
		Expires  int64 `json:"exp"`
	}{}
	if json.Unmarshal(raw, &claims) != nil || claims.Expires <= claims.IssuedAt {
		return t
	}
	t.issued, t.expires = time.Unix(claims.IssuedAt, 0), time.Unix(claims.Expires, 0)
	return t
}

// untilDue returns how long after its issue t is to be renewed. A token that says nothing of its life is taken to live as long as was asked for.
func (t token) untilDue(asked time.Duration) time.Duration {
	life := asked
	if !t.expires.IsZero() {
		life = t.expires.Sub(t.issued)
	}
	return time.Duration(float64(life) * renewAt)
}
