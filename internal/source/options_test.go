package source_test

import (
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/source"
)

// The options must have the effect of the flags --insecure-skip-tls-verify, --ca-file and --plain-http of helm pull.
func TestTransportOptionsOfRegistries(t *testing.T) {
	t.Parallel()
	handler := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	plain := serve(t, handler)
	push(t, strings.TrimPrefix(plain, "http://")+"/charts/hello:0.1.0", exampleArchive(t, examples.Chart{Version: "0.1.0"}), chartMediaType)
	secure := httptest.NewTLSServer(handler)
	t.Cleanup(secure.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw})
	for name, test := range map[string]struct {
		address string
		login   source.Login
		want    string
	}{
		"TLS, unknown authority":           {address: secure.URL, want: "certificate"},
		"TLS, own authority":               {address: secure.URL, login: source.Login{CA: ca}},
		"TLS, not checked":                 {address: secure.URL, login: source.Login{InsecureSkipTLSVerify: true}},
		"TLS, plainHTTP":                   {address: secure.URL, login: source.Login{PlainHTTP: true}, want: "400"},
		"no TLS":                           {address: plain, want: "HTTP response to HTTPS client"},
		"no TLS, not checked":              {address: plain, login: source.Login{InsecureSkipTLSVerify: true}, want: "HTTP response to HTTPS client"},
		"no TLS, plainHTTP":                {address: plain, login: source.Login{PlainHTTP: true}},
		"no TLS, plainHTTP, own authority": {address: plain, login: source.Login{PlainHTTP: true, CA: ca}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, host, _ := strings.Cut(test.address, "://")
			charts := newCharts(t, t.TempDir())
			err := awaitResponse(func() error {
				_, err := charts.Fetch(t.Context(), helmChart("oci://"+host+"/charts", "hello", "0.1.0"), test.login, source.Verification{}, nil)
				return err
			})
			if test.want == "" && err != nil {
				t.Error(err)
			}
			if test.want != "" {
				wantTexts(t, err, test.want)
			}
		})
	}
}

// Like in Helm, plainHTTP has an effect only on OCI registries: requests to https:// still use TLS.
func TestPlainHTTPIsForRegistriesOnly(t *testing.T) {
	t.Parallel()
	server := httptest.NewTLSServer(exampleRepository(t))
	t.Cleanup(server.Close)
	login := source.Login{PlainHTTP: true}
	_, err := newCharts(t, t.TempDir()).Fetch(t.Context(), helmChart(server.URL, "hello", "0.1.0"), login, source.Verification{}, nil)
	wantTexts(t, err, "certificate")
	login.InsecureSkipTLSVerify = true
	if _, err := newCharts(t, t.TempDir()).Fetch(t.Context(), helmChart(server.URL, "hello", "0.1.0"), login, source.Verification{}, nil); err != nil {
		t.Error(err)
	}
}

// The options of a repository apply to every host that its index names, and to the provenance file beside the archive.
// Without passCredentialsAll the login is sent only to the scheme, host and port of the repository, and never after a
// redirect to another host.
func TestPassCredentialsAll(t *testing.T) {
	t.Parallel()
	archive := exampleArchive(t, examples.Chart{Version: "0.1.0"})
	signer := publisher(t, &packet.Config{})
	file := sign(t, signer, archive, "hello-0.1.0.tgz")
	seen := make(chan string, 10)
	elsewhere := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, _, _ := r.BasicAuth()
		seen <- r.URL.Path + " " + user
		httpHandler(archive, file).ServeHTTP(w, r)
	}))
	t.Cleanup(elsewhere.Close)
	foreign, err := url.Parse(elsewhere.URL)
	if err != nil {
		t.Fatal(err)
	}
	foreign.Host = "localhost:" + foreign.Port() // another host name than the repository's 127.0.0.1
	for name, test := range map[string]struct {
		index string
		all   bool
		want  []string
	}{
		"elsewhere":                      {index: elsewhere.URL + "/hello-0.1.0.tgz", want: []string{"/hello-0.1.0.tgz ", "/hello-0.1.0.tgz.prov "}},
		"elsewhere, passCredentialsAll":  {index: elsewhere.URL + "/hello-0.1.0.tgz", all: true, want: []string{"/hello-0.1.0.tgz me", "/hello-0.1.0.tgz.prov me"}},
		"redirected":                     {index: "redirected/hello-0.1.0.tgz", want: []string{"/hello-0.1.0.tgz ", "/hello-0.1.0.tgz.prov "}},
		"redirected, passCredentialsAll": {index: "redirected/hello-0.1.0.tgz", all: true, want: []string{"/hello-0.1.0.tgz ", "/hello-0.1.0.tgz.prov "}},
	} {
		mux := http.NewServeMux()
		mux.Handle("/", text("entries:\n  hello:\n  - {version: 0.1.0, urls: ['"+test.index+"']}\n"))
		mux.HandleFunc("/redirected/", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, foreign.String()+strings.TrimPrefix(r.URL.Path, "/redirected"), http.StatusFound)
		})
		address := serve(t, withPassword(mux))
		login := source.Login{Username: "me", Password: "s:cret", PassCredentialsAll: test.all, InsecureSkipTLSVerify: true}
		_, err := newCharts(t, t.TempDir()).Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), login,
			source.Verification{Keyring: keyring(t, signer)}, nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var got []string
		for range test.want {
			got = append(got, <-seen)
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: users by requested path (-want +got):\n%s", name, diff)
		}
	}
}
