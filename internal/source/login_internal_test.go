package source

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestDockerConfigWithPaths reads Docker configurations with several logins for one host. Each login is read often: the
// order of a map differs.
func TestDockerConfigWithPaths(t *testing.T) {
	t.Parallel()
	const login = `%q: {"username": %q, "password": "p"}`
	for name, test := range map[string]struct {
		keys [2]string
		url  string
		want string // the key
	}{
		"path of the repository":      {[2]string{"r.example.com/a", "r.example.com/b"}, "oci://r.example.com/b/charts", "r.example.com/b"},
		"repository itself":           {[2]string{"r.example.com/a", "https://r.example.com/b/"}, "oci://r.example.com/b", "https://r.example.com/b/"},
		"longest path":                {[2]string{"r.example.com/a/b", "r.example.com/a"}, "oci://r.example.com/a/b/c", "r.example.com/a/b"},
		"part of a segment":           {[2]string{"r.example.com/a", "r.example.com"}, "oci://r.example.com/ab", "r.example.com"},
		"host rather than other path": {[2]string{"r.example.com/a", "r.example.com"}, "oci://r.example.com/b", "r.example.com"},
		"only other paths":            {[2]string{"r.example.com/b", "r.example.com/a"}, "oci://r.example.com/c", "r.example.com/a"},
		"two names of a registry":     {[2]string{"https://index.docker.io/v1/", "docker.io"}, "oci://docker.io/me", "docker.io"},
		"version of the API":          {[2]string{"https://r.example.com/v2/", "r.example.com/a"}, "oci://r.example.com/b", "https://r.example.com/v2/"},
	} {
		config := "{\"auths\": {" + fmt.Sprintf(login, test.keys[0], test.keys[0]) + ", " + fmt.Sprintf(login, test.keys[1], test.keys[1]) + "}}"
		secret := &corev1.Secret{Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(config)}}
		for range 30 {
			var got Login
			if err := got.readCredentials(secret, "", test.url); err != nil || got.Username != test.want {
				t.Errorf("%s: got the login of %q, %v, want the one of %q", name, got.Username, err, test.want)
				break
			}
		}
	}
}
