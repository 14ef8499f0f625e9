package source_test

import (
	"bytes"
	"errors"
	"io"
	"log"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/armor"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/google/go-containerregistry/pkg/registry"
	"helm.sh/helm/v4/pkg/provenance"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/source"
)

const (
	chartMediaType      = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
	provenanceMediaType = "application/vnd.cncf.helm.chart.provenance.v1.prov"
)

// publisher returns a new OpenPGP entity.
func publisher(t *testing.T, config *packet.Config) *openpgp.Entity {
	t.Helper()
	config.Algorithm = packet.PubKeyAlgoEdDSA
	entity, err := openpgp.NewEntity("publisher", "", "publisher@example.com", config)
	if err != nil {
		t.Fatal(err)
	}
	return entity
}

func keyring(t *testing.T, publishers ...*openpgp.Entity) []byte {
	t.Helper()
	var out bytes.Buffer
	for _, entity := range publishers {
		if err := entity.Serialize(&out); err != nil {
			t.Fatal(err)
		}
	}
	return out.Bytes()
}

func armored(t *testing.T, keys []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	writer, err := armor.Encode(&out, openpgp.PublicKeyType, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := writer.Write(keys); err != nil {
		t.Fatal(err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// sign returns the provenance file of an archive, like helm package --sign.
func sign(t *testing.T, entity *openpgp.Entity, archive []byte, name string) []byte {
	t.Helper()
	file, err := (&provenance.Signatory{Entity: entity}).ClearSign(archive, name, []byte("name: hello\nversion: 0.1.0\n"))
	if err != nil {
		t.Fatal(err)
	}
	return []byte(file)
}

func exampleArchive(t *testing.T, chart examples.Chart) []byte {
	t.Helper()
	archive, err := chart.Archive()
	if err != nil {
		t.Fatal(err)
	}
	return archive
}

// httpHandler serves hello 0.1.0 over HTTP, with a provenance file unless file is nil.
func httpHandler(archive, file []byte) http.Handler {
	bodies := map[string]string{
		"/index.yaml":      "entries:\n  hello:\n  - {version: 0.1.0, urls: [hello-0.1.0.tgz]}\n",
		"/hello-0.1.0.tgz": string(archive),
	}
	if file != nil {
		bodies["/hello-0.1.0.tgz.prov"] = string(file)
	}
	return at(bodies)
}

// serveRegistry serves hello 0.1.0 in an OCI registry, with a provenance file unless file is nil.
func serveRegistry(t *testing.T, archive, file []byte) string {
	t.Helper()
	host := strings.TrimPrefix(serve(t, registry.New(registry.Logger(log.New(io.Discard, "", 0)))), "http://")
	layers := []blob{{mediaType: chartMediaType, content: archive}}
	if file != nil {
		layers = append(layers, blob{mediaType: provenanceMediaType, content: file})
	}
	pushArtifact(t, host+"/charts/hello:0.1.0", nil, layers...)
	return "oci://" + host + "/charts"
}

func TestProvenanceIsVerified(t *testing.T) {
	t.Parallel()
	archive := exampleArchive(t, examples.Chart{Version: "0.1.0"})
	tampered := exampleArchive(t, examples.Chart{Version: "0.1.0", AppVersion: "evil"})
	other := exampleArchive(t, examples.Chart{Version: "0.2.0"})
	now := &packet.Config{}
	signer, otherSigner := publisher(t, now), publisher(t, now)
	yearsAgo := time.Now().Add(-3 * 365 * 24 * time.Hour)
	expired := publisher(t, &packet.Config{Time: func() time.Time { return yearsAgo }, KeyLifetimeSecs: 3600})
	good := sign(t, signer, archive, "hello-0.1.0.tgz")
	aliases, err := (&provenance.Signatory{Entity: signer}).ClearSign(archive, "hello-0.1.0.tgz",
		[]byte("a: b\n...\nx: &a "+strings.Repeat("x", 50<<10)+"\ny: ["+strings.Repeat("*a, ", 500)+"]"))
	if err != nil {
		t.Fatal(err)
	}
	trusted := keyring(t, signer)
	for name, test := range map[string]struct {
		archive, file, keyring []byte
		want                   string
	}{
		"good signature":            {archive: archive, file: good, keyring: trusted},
		"one key of several":        {archive: archive, file: good, keyring: keyring(t, otherSigner, signer)},
		"armored keyring":           {archive: archive, file: good, keyring: armored(t, trusted)},
		"tampered archive":          {archive: tampered, file: good, keyring: trusted, want: "sha256 sum does not match for hello-0.1.0.tgz"},
		"tampered provenance file":  {archive: archive, file: bytes.Replace(good, []byte("sha256:"), []byte("sha256:0"), 1), keyring: trusted, want: "signature"},
		"wrong key":                 {archive: archive, file: good, keyring: keyring(t, otherSigner), want: "signature made by unknown entity"},
		"missing signature":         {archive: archive, keyring: trusted, want: "the chart has no provenance file"},
		"no signature in the file":  {archive: archive, file: []byte("name: hello\n"), keyring: trusted, want: "signature block not found"},
		"another version's file":    {archive: archive, file: sign(t, signer, other, "hello-0.2.0.tgz"), keyring: trusted, want: `no SHA`},
		"another chart's file":      {archive: archive, file: sign(t, signer, other, "kyverno-0.1.0.tgz"), keyring: trusted, want: `no SHA`},
		"another chart's archive":   {archive: other, file: sign(t, signer, other, "hello-0.1.0.tgz"), keyring: trusted, want: "the archive contains chart hello 0.2.0"},
		"aliases":                   {archive: archive, file: []byte(aliases), keyring: trusted, want: "aliases make it too large"},
		"expired key":               {archive: archive, file: sign(t, expired, archive, "hello-0.1.0.tgz"), keyring: keyring(t, expired), want: "expired"},
		"garbage keyring":           {archive: archive, file: good, keyring: []byte("garbage"), want: "key keyring.gpg: "},
		"truncated armored keyring": {archive: archive, file: good, keyring: armored(t, trusted)[:60], want: "key keyring.gpg: "},
	} {
		want := strings.Replace(test.want, "no SHA", "provenance does not contain a SHA for a file named", 1)
		for scheme, serveIt := range map[string]func(t *testing.T) string{
			"http": func(t *testing.T) string { t.Helper(); return serve(t, httpHandler(test.archive, test.file)) },
			"oci":  func(t *testing.T) string { t.Helper(); return serveRegistry(t, test.archive, test.file) },
		} {
			t.Run(name+" in "+scheme, func(t *testing.T) {
				t.Parallel()
				address := serveIt(t)
				_, err := newCharts(t, t.TempDir()).Fetch(t.Context(), helmChart(address, "repo/hello", "0.1.0"),
					source.Login{PlainHTTP: true}, source.Verification{Keyring: test.keyring}, nil)
				if want == "" {
					if err != nil {
						t.Error(err)
					}
					return
				}
				wantInvalid(t, err)
				wantTexts(t, err, "chart repo/hello 0.1.0 in "+address+": ", want)
			})
		}
	}
}

func TestUnreachableProvenanceIsRetried(t *testing.T) {
	t.Parallel()
	archive := exampleArchive(t, examples.Chart{Version: "0.1.0"})
	signer := publisher(t, &packet.Config{})
	repository := httpHandler(archive, sign(t, signer, archive, "hello-0.1.0.tgz"))
	server := newCountingServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, ".prov") {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		repository.ServeHTTP(w, r)
	}))
	address, charts := serve(t, server), newCharts(t, t.TempDir())
	verification := source.Verification{Keyring: keyring(t, signer)}
	_, err := charts.Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), source.Login{}, verification, nil)
	wantTexts(t, err, "hello-0.1.0.tgz.prov", "502 Bad Gateway")
	if errors.Is(err, source.ErrUnverified) {
		t.Errorf("got %v, want an error about the connection to the repository", err)
	}
	server.setHandler(repository)
	newSpec := func() string { return "new" }
	if _, err := charts.Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), source.Login{}, verification, newSpec); err != nil {
		t.Error(err)
	}
}

// A cached archive that was fetched without verification, or verified with another key, must not be used.
func TestVerificationIsNotBypassedByCachedCharts(t *testing.T) {
	t.Parallel()
	archive := exampleArchive(t, examples.Chart{Version: "0.1.0"})
	signer, otherSigner := publisher(t, &packet.Config{}), publisher(t, &packet.Config{})
	good := httpHandler(archive, sign(t, signer, archive, "hello-0.1.0.tgz"))
	server := newCountingServer(httpHandler(exampleArchive(t, examples.Chart{Version: "0.1.0", AppVersion: "evil"}), nil))
	address, dir := serve(t, server), t.TempDir()
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	charts, err := source.NewCharts(dir, clock)
	if err != nil {
		t.Fatal(err)
	}
	fetch := func(charts *source.Charts, version string, verification source.Verification) (source.Chart, error) {
		return charts.Fetch(t.Context(), helmChart(address, "hello", version), source.Login{}, verification, nil)
	}
	trusted, foreign := source.Verification{Keyring: keyring(t, signer)}, source.Verification{Keyring: keyring(t, otherSigner)}
	unsigned, err := fetch(charts, "0.1.0", source.Verification{})
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range []string{"0.1.0", "v0.1.0", "0.x"} {
		if got, err := fetch(charts, version, trusted); !errors.Is(err, source.ErrUnverified) {
			t.Errorf("version %s: got %v and %v, want ErrUnverified", version, got, err)
		}
	}

	// The hub sends the next request after one minute, not for every cluster.
	server.setHandler(good)
	if _, err := fetch(charts, "0.1.0", trusted); !errors.Is(err, source.ErrUnverified) {
		t.Errorf("got %v, want the remembered refusal", err)
	}
	clock.SetTime(time.Unix(61, 0))
	verified, err := fetch(charts, "0.1.0", trusted)
	if err != nil {
		t.Fatal(err)
	}
	if verified.Digest == unsigned.Digest {
		t.Error("the verified chart is the tampered one")
	}
	if _, err := fetch(charts, "0.1.0", foreign); !errors.Is(err, source.ErrUnverified) {
		t.Errorf("got %v for another key, want ErrUnverified", err)
	}

	// A chart is verified once for a key: neither this process nor the next process needs the repository again.
	requests := server.countRequests("/hello-0.1.0.tgz.prov")
	server.setHandler(http.NotFoundHandler())
	for _, again := range []*source.Charts{charts, newCharts(t, dir)} {
		got, err := fetch(again, "0.1.0", trusted)
		if err != nil || got != verified {
			t.Errorf("got %v and %v, want the verified chart", got, err)
		}
		if _, err := fetch(again, "0.1.0", foreign); err == nil {
			t.Error("a chart is accepted for a key that did not sign it")
		}
	}
	if got := server.countRequests("/hello-0.1.0.tgz.prov"); got != requests {
		t.Errorf("the provenance file was requested %d more times", got-requests)
	}
	if got, err := fetch(charts, "0.1.0", source.Verification{}); err != nil || got != unsigned {
		t.Errorf("got %v and %v without verification, want the cached chart", got, err)
	}
}
