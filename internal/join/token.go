package join

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/towline/towline/internal/kube"
)

// renewalFraction is the fraction of a token's life after which it is renewed. The rest is for retries while the hub is
// unavailable.
const renewalFraction = 0.8

// token is a bearer token, with the claims that this package uses. The times and boundTo are zero if the token is no
// JWT, or if it does not expire.
type token struct {
	text    string
	issued  time.Time
	expires time.Time
	// boundTo is the uid of the Secret to which the token is bound, "" for none.
	boundTo types.UID
}

// readToken reads the claims of a ServiceAccount token without verification, which only its API server can do. The
// claims are used to schedule renewals.
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
		Bound    struct {
			Secret struct {
				UID types.UID `json:"uid"`
			} `json:"secret"`
		} `json:"kubernetes.io"`
	}{}
	if json.Unmarshal(raw, &claims) != nil || claims.Expires <= claims.IssuedAt {
		return t
	}
	t.issued, t.expires = time.Unix(claims.IssuedAt, 0), time.Unix(claims.Expires, 0)
	t.boundTo = claims.Bound.Secret.UID
	return t
}

// tokenIn reads the token in a member's manifest. It returns an empty token if patches made the manifest unreadable, or
// if the manifest has no token.
func tokenIn(manifest []byte) token {
	objects, err := kube.DecodeLenient(manifest)
	if err != nil {
		return token{}
	}
	for _, obj := range objects {
		encoded, _, _ := unstructured.NestedString(obj.Object, "data", KubeconfigKey)
		raw, err := base64.StdEncoding.DecodeString(encoded)
		if obj.GetKind() != "Secret" || err != nil {
			continue
		}
		config, err := clientcmd.Load(raw)
		if err != nil {
			continue
		}
		for _, user := range config.AuthInfos {
			if user.Token != "" {
				return readToken(user.Token)
			}
		}
	}
	return token{}
}

// untilRenewal returns the time from the issue of t until its renewal. requestedLife is used as in life.
func (t token) untilRenewal(requestedLife time.Duration) time.Duration {
	return time.Duration(float64(t.life(requestedLife)) * renewalFraction)
}

// life returns the time from the issue of t until it expires, or requestedLife if t has no times.
func (t token) life(requestedLife time.Duration) time.Duration {
	if t.expires.IsZero() || t.issued.IsZero() {
		return requestedLife
	}
	return t.expires.Sub(t.issued)
}
