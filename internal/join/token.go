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

// renewAt is the part of a token's life after which it is renewed: early enough for many attempts while the hub is
// away.
const renewAt = 0.8

// token is a bearer token and what it says of itself. The times are zero, and the names empty, if it says nothing.
type token struct {
	text    string
	issued  time.Time
	expires time.Time
	// boundTo is the Secret without which it is worthless.
	boundTo boundSecret
}

// boundSecret is the Secret that a token is bound to, as the token's claims say it.
type boundSecret struct {
	Name string    `json:"name"`
	UID  types.UID `json:"uid"`
}

// readToken reads what a ServiceAccount token says. Only the hub can and does verify it; here it is for planning.
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
			Secret boundSecret `json:"secret"`
		} `json:"kubernetes.io"`
	}{}
	if json.Unmarshal(raw, &claims) != nil || claims.Expires <= claims.IssuedAt {
		return t
	}
	t.issued, t.expires = time.Unix(claims.IssuedAt, 0), time.Unix(claims.Expires, 0)
	t.boundTo = claims.Bound.Secret
	return t
}

// tokenIn reads the token in a member's manifest. What patches made unreadable says nothing.
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

// untilRenewal returns the time from the creation of t until its renewal.
func (t token) untilRenewal(asked time.Duration) time.Duration {
	return time.Duration(float64(t.life(asked)) * renewAt)
}

// life returns how long t lives. A token that says nothing of its life is taken to live as long as was asked for.
func (t token) life(asked time.Duration) time.Duration {
	if t.expires.IsZero() || t.issued.IsZero() {
		return asked
	}
	return t.expires.Sub(t.issued)
}
