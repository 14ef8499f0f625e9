package source

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sigstore/sigstore-go/pkg/bundle"
	"github.com/sigstore/sigstore-go/pkg/root"
	clocktesting "k8s.io/utils/clock/testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// keylessVariable makes this test binary verify a keyless signature like a hub. Its value is the cache directory.
const keylessVariable = "TOWLINE_TEST_KEYLESS_CACHE"

// TestPublicTrustRootIsFetchedFromSigstore starts a verification without a trust root behind a proxy that refuses the
// connection. The connection must be to the TUF repository of Sigstore's public services. Go reads the proxy from the
// environment once per process, so the verification runs in another process.
func TestPublicTrustRootIsFetchedFromSigstore(t *testing.T) {
	t.Parallel()
	if dir := os.Getenv(keylessVariable); dir != "" {
		verifyWithDefaults(t, dir)
		return
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	requested := make(chan string, 100)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if request, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
				requested <- request.Method + " " + request.Host
				_, _ = conn.Write([]byte("HTTP/1.1 403 Forbidden\r\n\r\n")) // the client also fails without this response
			}
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = listener.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = []string{keylessVariable + "=" + t.TempDir(), "HTTPS_PROXY=http://" + listener.Addr().String(), "HOME=" + t.TempDir()}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const want = "CONNECT tuf-repo-cdn.sigstore.dev:443"
	select {
	case got := <-requested:
		if got != want {
			t.Errorf("got the request %q, want %q", got, want)
		}
	default:
		t.Errorf("got no request, want %q", want)
	}
}

// verifyWithDefaults verifies like the hub. It must fail with the response of the proxy.
func verifyWithDefaults(t *testing.T, dir string) {
	t.Helper()
	charts, err := NewCharts(dir, clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	_, err = charts.newSignaturePolicy(SignatureRequirement{Identities: []configv1beta1.OIDCIdentityMatch{{Issuer: ".", Subject: "."}}})
	if err == nil || !strings.Contains(err.Error(), "fetch the public trust root of Sigstore") || !strings.Contains(err.Error(), "Forbidden") {
		t.Errorf("got %v, want the response of the proxy", err)
	}
}

// TestSignatureOfThePublicServices verifies a bundle of Sigstore's public services with their trust root: a certificate
// with its timestamp, and its entry in the transparency log. The bundle is the provenance of an npm package. It is
// refused as the signature of a chart only after the certificate and the entry were verified.
func TestSignatureOfThePublicServices(t *testing.T) {
	t.Parallel()
	const (
		digest  = "sha512:46d4e2f74c4877316640000a6fdf8a8b59f1e0847667973e9859f774dd31b8f1e0937813b777fb66a2ac67d50540fe34640966eee9fc2ccca387082b4c85cd3c"
		issuer  = `^https://token\.actions\.githubusercontent\.com$`
		subject = `^https://github\.com/sigstore/sigstore-js/\.github/workflows/release\.yml@refs/heads/main$`
	)
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/sigstore/sigstore-go").Output()
	if err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(strings.TrimSpace(string(out)), "pkg", "testing", "data")
	public, err := root.NewTrustedRootFromPath(filepath.Join(data, "trusted-roots", "public-good.json"))
	if err != nil {
		t.Fatal(err)
	}
	signed, err := bundle.LoadJSONFromPath(filepath.Join(data, "bundles", "sigstore.js@2.0.0-provenance.sigstore.json"))
	if err != nil {
		t.Fatal(err)
	}
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	charts.publicRoot = func() (root.TrustedMaterial, error) { return public, nil }
	empty := []byte(emptyRoot)
	for name, test := range map[string]struct {
		digest, subject string
		root            []byte
		want            string
	}{
		"all is verified":    {digest, subject, nil, "it is no signature but a statement of another type"},
		"another digest":     {strings.Replace(digest, "46d4", "46d5", 1), subject, nil, "digest"},
		"another identity":   {digest, "^https://github.com/somebody/", nil, "no matching CertificateIdentity"},
		"another trust root": {digest, subject, empty, "failed to verify"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			policy, err := charts.newSignaturePolicy(SignatureRequirement{
				Identities: []configv1beta1.OIDCIdentityMatch{{Issuer: issuer, Subject: test.subject}}, TrustRoot: test.root,
			})
			if err != nil {
				t.Fatal(err)
			}
			err = policy.verify(cosignSignature{bundle: signed}, test.digest)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want an error with %q", err, test.want)
			}
		})
	}
}
