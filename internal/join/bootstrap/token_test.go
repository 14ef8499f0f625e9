package bootstrap_test

import (
	"strings"
	"testing"

	"github.com/towline/towline/internal/join/bootstrap"
)

func TestParseToken(t *testing.T) {
	t.Parallel()
	token, err := bootstrap.ParseToken(testToken)
	if err != nil || token.ID != "abcdef" || token.Secret != "0123456789abcdef" || token.String() != testToken {
		t.Errorf("token %+v, error %v", token, err)
	}
	for _, text := range []string{"", "abcdef", "abcdef.", "abcdef.0123456789abcde", "abcdef.0123456789abcdefg", "ABCDEF.0123456789abcdef", " " + testToken, testToken + "\n", "abcdef-0123456789abcdef"} {
		_, err := bootstrap.ParseToken(text)
		if err == nil {
			t.Errorf("%q is taken for a token", text)
		}
		if err != nil && strings.Contains(err.Error(), "0123456789") {
			t.Errorf("the error tells the secret: %v", err)
		}
	}
}

func TestBoundCluster(t *testing.T) {
	t.Parallel()
	const prefix = "system:bootstrappers:karmada:cluster:"
	tests := map[string]struct {
		groups []string
		want   string
		wantOK bool
	}{
		"any cluster":    {[]string{bootstrap.DefaultTokenGroup}, "", false},
		"one":            {[]string{bootstrap.DefaultTokenGroup, prefix + "a"}, "a", true},
		"the same twice": {[]string{prefix + "a", prefix + "a"}, "a", true},
		"two":            {[]string{prefix + "a", prefix + "b"}, "", true},
		"two and again":  {[]string{prefix + "a", prefix + "b", prefix + "b"}, "", true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got, ok := bootstrap.BoundCluster(tc.groups); got != tc.want || ok != tc.wantOK {
				t.Errorf("got %q, %v", got, ok)
			}
		})
	}
}
