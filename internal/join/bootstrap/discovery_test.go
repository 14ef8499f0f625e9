package bootstrap_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/towline/towline/internal/join/bootstrap"
)

const testToken = "abcdef.0123456789abcdef"

// fakeHub is an API server that serves the cluster-info of a test.
type fakeHub struct {
	*httptest.Server
	// respond writes the response to the n-th request, from 0.
	respond  func(n int, w http.ResponseWriter)
	requests atomic.Int32
}

func newFakeHub(t *testing.T) *fakeHub {
	t.Helper()
	s := &fakeHub{}
	s.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/namespaces/kube-public/configmaps/cluster-info" || r.Header.Get("Authorization") != "" {
			http.NotFound(w, r)
			return
		}
		s.respond(int(s.requests.Add(1))-1, w)
	}))
	t.Cleanup(s.Close)
	s.respond = func(_ int, w http.ResponseWriter) { writeConfigMap(w, s.clusterInfo()) }
	return s
}

func (s *fakeHub) ca() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

func kubeconfig(server string, ca []byte) string {
	config := clientcmdapi.NewConfig()
	config.Clusters[""] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca}
	text, err := clientcmd.Write(*config)
	if err != nil {
		panic(err) // it is made of constants
	}
	return string(text)
}

// clusterInfo returns the data of a correct cluster-info.
func (s *fakeHub) clusterInfo() map[string]string {
	return signedClusterInfo(kubeconfig(s.URL, s.ca()), testToken)
}

// signedClusterInfo is content with the signature of token, made here without the code under test.
func signedClusterInfo(content, token string) map[string]string {
	id, secret, _ := strings.Cut(token, ".")
	head := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"alg":"HS256","kid":"%s"}`, id))
	return map[string]string{"kubeconfig": content, "jws-kubeconfig-" + id: head + ".." + macOf(head, content, secret)}
}

func macOf(head, content, secret string) string {
	mac := hmac.New(sha256.New, []byte(secret))
	_, _ = mac.Write([]byte(head + "." + base64.RawURLEncoding.EncodeToString([]byte(content))))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

func writeConfigMap(w http.ResponseWriter, data map[string]string) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(corev1.ConfigMap{Data: data})
}

// discovery returns a Discovery of s with its token and pins.
func (s *fakeHub) discovery(t *testing.T) bootstrap.Discovery {
	t.Helper()
	token, errToken := bootstrap.ParseToken(testToken)
	pins, errPins := bootstrap.Pins(s.ca())
	if errToken != nil || errPins != nil {
		t.Fatal(errToken, errPins)
	}
	return bootstrap.Discovery{
		Endpoint: strings.TrimPrefix(s.URL, "https://"), Token: token, Pins: pins, Timeout: 100 * time.Millisecond, Progress: func(string) {},
	}
}

func TestDiscoveryReturnsTheCA(t *testing.T) {
	t.Parallel()
	tests := map[string]func(*fakeHub, *bootstrap.Discovery){
		"with a pin":    func(*fakeHub, *bootstrap.Discovery) {},
		"in upper case": func(_ *fakeHub, d *bootstrap.Discovery) { d.Pins = []string{strings.ToUpper(d.Pins[0])} },
		"with a pin of another": func(_ *fakeHub, d *bootstrap.Discovery) {
			d.Pins = append([]string{"sha256:" + strings.Repeat("0", 64)}, d.Pins...)
		},
		"without pins": func(_ *fakeHub, d *bootstrap.Discovery) { d.Pins, d.UnsafeSkipCA = nil, true },
		"signed a moment later": func(s *fakeHub, d *bootstrap.Discovery) {
			d.Timeout = time.Minute
			s.respond = func(n int, w http.ResponseWriter) {
				info := s.clusterInfo()
				if n == 0 {
					delete(info, "jws-kubeconfig-abcdef")
				}
				writeConfigMap(w, info)
			}
		},
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newFakeHub(t)
			d := s.discovery(t)
			change(s, &d)
			ca, err := d.CA(t.Context())
			if err != nil || string(ca) != string(s.ca()) {
				t.Errorf("CA %q, error %v", ca, err)
			}
		})
	}
}

func TestDiscoveryRejectsUntrustedResponses(t *testing.T) {
	t.Parallel()
	other := newFakeHub(t)
	always := func(info func(*fakeHub) map[string]string) func(*fakeHub, *bootstrap.Discovery) {
		return func(s *fakeHub, _ *bootstrap.Discovery) {
			s.respond = func(_ int, w http.ResponseWriter) { writeConfigMap(w, info(s)) }
		}
	}
	const forged = "failed to verify JWS signature of received cluster info object, can't trust this API Server"
	const expired = `token id "abcdef" is invalid for this cluster or it has expired. Use "karmadactl token create"`
	tests := map[string]struct {
		change func(*fakeHub, *bootstrap.Discovery)
		want   string
	}{
		"neither pins nor unsafe": {func(_ *fakeHub, d *bootstrap.Discovery) { d.Pins = nil }, "need to verify CACertHashes, or set --discovery-token-unsafe-skip-ca-verification=true"},
		"a pin that is none":      {func(_ *fakeHub, d *bootstrap.Discovery) { d.Pins = []string{"sha256:00"} }, "invalid CA certificate hash"},
		"a pin of another kind":   {func(_ *fakeHub, d *bootstrap.Discovery) { d.Pins = []string{"sha512:" + strings.Repeat("0", 128)} }, "invalid CA certificate hash"},
		"a wrong pin": {func(_ *fakeHub, d *bootstrap.Discovery) {
			d.Pins = []string{"sha256:" + strings.Repeat("0", 64)}
		}, "cluster CA found in cluster-info ConfigMap is invalid: none of the public keys"},
		"no signature": {always(func(s *fakeHub) map[string]string {
			return map[string]string{"kubeconfig": s.clusterInfo()["kubeconfig"]}
		}), expired},
		"another token's signature": {always(func(s *fakeHub) map[string]string {
			return signedClusterInfo(s.clusterInfo()["kubeconfig"], "ghijkl.0123456789abcdef")
		}), expired},
		"a signature with another secret": {always(func(s *fakeHub) map[string]string {
			return signedClusterInfo(s.clusterInfo()["kubeconfig"], "abcdef.ffffffffffffffff")
		}), forged},
		"a tampered kubeconfig": {always(func(s *fakeHub) map[string]string {
			info := s.clusterInfo()
			info["kubeconfig"] += "#"
			return info
		}), forged},
		"the algorithm none": {always(func(s *fakeHub) map[string]string {
			head := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","kid":"abcdef"}`))
			return map[string]string{"kubeconfig": s.clusterInfo()["kubeconfig"], "jws-kubeconfig-abcdef": head + ".."}
		}), forged},
		"another algorithm's name": {always(func(s *fakeHub) map[string]string {
			head, content := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"HS512","kid":"abcdef"}`)), s.clusterInfo()["kubeconfig"]
			return map[string]string{"kubeconfig": content, "jws-kubeconfig-abcdef": head + ".." + macOf(head, content, "0123456789abcdef")}
		}), forged},
		"another content in the signature": {always(func(s *fakeHub) map[string]string {
			info := s.clusterInfo()
			info["jws-kubeconfig-abcdef"] = strings.Replace(info["jws-kubeconfig-abcdef"], "..", ".eA.", 1)
			return info
		}), forged},
		"no kubeconfig": {always(func(*fakeHub) map[string]string { return map[string]string{} }), "no kubeconfig"},
		"two clusters": {always(func(s *fakeHub) map[string]string {
			return signedClusterInfo(strings.Replace(s.clusterInfo()["kubeconfig"], "clusters:\n", "clusters:\n- cluster:\n    server: https://x\n  name: x\n", 1), testToken)
		}), "exactly one cluster"},
		"no authority": {always(func(s *fakeHub) map[string]string { return signedClusterInfo(kubeconfig(s.URL, nil), testToken) }), "no certificate authority"},
		"another answer over the verified connection": {func(s *fakeHub, _ *bootstrap.Discovery) {
			s.respond = func(n int, w http.ResponseWriter) {
				writeConfigMap(w, signedClusterInfo(kubeconfig(fmt.Sprintf("https://x%d", n), s.ca()), testToken))
			}
		}, "is not the same"},
		"no right to read": {func(s *fakeHub, _ *bootstrap.Discovery) {
			s.respond = func(_ int, w http.ResponseWriter) {
				http.Error(w, `{"kind":"Status","message":"forbidden to you"}`, http.StatusForbidden)
			}
		}, "forbidden to you"},
		"a redirection": {func(s *fakeHub, _ *bootstrap.Discovery) {
			s.respond = func(_ int, w http.ResponseWriter) {
				w.Header().Set("Location", other.URL)
				w.WriteHeader(http.StatusFound)
			}
		}, "could not find"},
		"nobody there": {func(s *fakeHub, _ *bootstrap.Discovery) { s.Close() }, "refused"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newFakeHub(t)
			d := s.discovery(t)
			tc.change(s, &d)
			ca, err := d.CA(t.Context())
			if err == nil || len(ca) > 0 {
				t.Fatalf("CA %q, error %v", ca, err)
			}
			if text := err.Error(); !strings.HasPrefix(text, "couldn't validate the identity of the API Server: ") || !strings.Contains(text, tc.want) {
				t.Errorf("error %q, want %q in it", text, tc.want)
			}
		})
	}
}

// Who knows the token can sign whatever he likes, but cannot speak for the pinned authority.
func TestDiscoveryTrustsOnlyThePinnedCA(t *testing.T) {
	t.Parallel()
	hub, thief := newFakeHub(t), newFakeHubWithOtherCA(t)
	thief.respond = func(_ int, w http.ResponseWriter) {
		writeConfigMap(w, signedClusterInfo(kubeconfig(thief.URL, slices.Concat(hub.ca(), thief.ca())), testToken))
	}
	d := hub.discovery(t)
	d.Endpoint = strings.TrimPrefix(thief.URL, "https://")
	if ca, err := d.CA(t.Context()); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("CA %q, error %v", ca, err)
	}
}

// newFakeHubWithOtherCA returns a fakeHub with a certificate of another authority than newFakeHub.
func newFakeHubWithOtherCA(t *testing.T) *fakeHub {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	s := &fakeHub{}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { s.respond(0, w) }))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

func TestDiscoveryEndsWithItsContext(t *testing.T) {
	t.Parallel()
	s := newFakeHub(t)
	d := s.discovery(t)
	d.Timeout = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	s.respond = func(_ int, w http.ResponseWriter) {
		http.Error(w, "later", http.StatusServiceUnavailable)
		cancel()
	}
	if _, err := d.CA(ctx); err == nil {
		t.Error("no error")
	}
}
