package fleet

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/test/fuzzing"
)

const fuzzedKubeconfig = `apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: a, user: u}}]
clusters: [{name: a, cluster: {server: "https://member.example.com:6443", proxy-url: "http://me:pa55w0rd-of-proxy@proxy:3128"}}]
users: [{name: u, user: {token: t0ken-of-the-user}}]
`

// FuzzParseKubeconfig parses kubeconfigs of clusters' owners.
func FuzzParseKubeconfig(f *testing.F) {
	f.Add([]byte(fuzzedKubeconfig))
	for _, user := range []string{
		"exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/sh, interactiveMode: Never}", "auth-provider: {name: gcp}",
		"tokenFile: /etc/passwd", "client-certificate: /a, client-key: /b", "username: me, password: pa55w0rd-of-user", "client-certificate-data: aGk=",
	} {
		f.Add([]byte(strings.Replace(fuzzedKubeconfig, "token: t0ken-of-the-user", user, 1)))
	}
	for _, cluster := range []string{`insecure-skip-tls-verify: true, server: "https://a"`, `certificate-authority: /a, server: "https://a"`, `server: "unix:///a"`, `server: "https://a%zz"`} {
		f.Add([]byte(strings.Replace(fuzzedKubeconfig, `server: "https://member.example.com:6443"`, cluster, 1)))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var config *rest.Config
		var err error
		fuzzing.Within(t, 64<<20+uint64(len(raw))*20_000, func() { config, err = ParseKubeconfig(raw) })
		fuzzing.OneLine(t, err)
		if err != nil {
			wantNoSecretOf(t, err, raw)
			return
		}
		if config.ExecProvider != nil || config.AuthProvider != nil {
			t.Errorf("the configuration runs a program: %+v", config)
		}
		if config.Insecure || config.BearerTokenFile != "" || config.CAFile != "" || config.CertFile != "" || config.KeyFile != "" {
			t.Errorf("the configuration names a file or skips the verification: %+v", config)
		}
		if config.Proxy != nil && strings.HasPrefix(config.Host, "https://") {
			wantProxy(t, config, raw)
		}
	})
}

// wantNoSecretOf checks that err contains no secret of the kubeconfig, if raw is a valid kubeconfig.
func wantNoSecretOf(t *testing.T, err error, raw []byte) {
	t.Helper()
	parsed, loadErr := clientcmd.Load(raw)
	if loadErr != nil {
		for _, secret := range []string{"t0ken-of-the-user", "pa55w0rd-of-proxy", "pa55w0rd-of-user"} {
			fuzzing.HidesSecret(t, err, raw, secret)
		}
		return
	}
	for _, user := range parsed.AuthInfos {
		fuzzing.HidesSecret(t, err, raw, user.Token)
		fuzzing.HidesSecret(t, err, raw, user.Password)
	}
	for _, cluster := range parsed.Clusters {
		if proxy, err := url.Parse(cluster.ProxyURL); err == nil {
			password, _ := proxy.User.Password()
			fuzzing.HidesSecret(t, err, raw, password)
		}
	}
}

// wantProxy checks that the proxy is in the kubeconfig.
func wantProxy(t *testing.T, config *rest.Config, raw []byte) {
	t.Helper()
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return // the configuration is invalid for a client
	}
	proxy, err := config.Proxy(&http.Request{URL: base})
	if err != nil || proxy == nil {
		return
	}
	parsed, err := clientcmd.Load(raw)
	if err != nil {
		t.Fatal(err)
	}
	for _, cluster := range parsed.Clusters {
		if named, err := url.Parse(cluster.ProxyURL); err == nil && named.Host == proxy.Host {
			return
		}
	}
	t.Errorf("the proxy %s is not in the kubeconfig", proxy)
}

// FuzzEndpoint parses addresses of API servers. A client for an accepted address connects only to its host.
func FuzzEndpoint(f *testing.F) {
	for _, text := range []string{
		"https://a.example.com:6443/prefix", "a", "[::1]:6443", "http://a", "https://me:pw@a", "https://a?x#y", "//a", "https:///a", "https://a@b", `https://a\@b`, "https://[fe80::1%25eth0]", "https://a:b", " a", "a\n",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		endpoint, err := ParseEndpoint(text)
		fuzzing.OneLine(t, err)
		if err != nil {
			return
		}
		secret := &corev1.Secret{Data: map[string][]byte{clusterv1alpha1.SecretTokenKey: []byte("token")}}
		config, err := (&Clients{}).newAccessConfig(Member{Access: &Access{Server: text, Insecure: true, Secret: client.ObjectKey{Namespace: "a", Name: "b"}}}, secret)
		if err != nil {
			t.Fatalf("%q is a valid address, and gives no configuration: %v", text, err)
		}
		base, _, err := rest.DefaultServerUrlFor(config)
		if err != nil {
			return
		}
		if base.Scheme != "https" || base.Host != endpoint.Host || base.User != nil {
			t.Errorf("%q connects to %s, want https and the host %s", text, base, endpoint.Host)
		}
		if !strings.Contains(strings.ToLower(text), strings.ToLower(endpoint.Port())) {
			t.Errorf("%q has no port %s", text, endpoint.Port())
		}
	})
}

// FuzzProxyURL parses proxy addresses, which may contain a password.
func FuzzProxyURL(f *testing.F) {
	for _, text := range []string{"http://proxy:3128", "socks5://me:pa55w0rd-of-proxy@proxy", "ftp://a", "https://", "http://a b:pa55w0rd-of-proxy@%", "file:///etc/passwd", "HTTP://a"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		err := ValidateProxyURL(text)
		fuzzing.OneLine(t, err)
		fuzzing.HidesSecret(t, err, []byte(text), "pa55w0rd-of-proxy")
		if err != nil || text == "" {
			return
		}
		proxy, err := url.Parse(text)
		if err != nil || proxy.Host == "" || proxy.Scheme != "http" && proxy.Scheme != "https" && proxy.Scheme != "socks5" {
			t.Errorf("%q is accepted: %v", text, err)
		}
	})
}
