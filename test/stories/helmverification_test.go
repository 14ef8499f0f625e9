package stories

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/ProtonMail/go-crypto/openpgp"
	"github.com/ProtonMail/go-crypto/openpgp/packet"
	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"helm.sh/helm/v4/pkg/provenance"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/registry/remote"

	"github.com/towline/towline/examples"
)

// signedCharts publishes and signs charts.
type signedCharts interface {
	// publish publishes a version of the chart, signed with a key, or unsigned if key is negative. If tampered, the
	// signature is for another archive.
	publish(version string, key int, tampered bool)
	// secret returns the key and the value of the Secret with the public half of a key.
	secret(key int) (name string, value []byte)
	// chart returns the fields of an item of helmCharts that require the verification with Secret default/<name>.
	chart(name string) map[string]any
}

// TestHelmVerification deploys charts only if they are signed with the key that the profile names, in both modes.
func TestHelmVerification(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	targets := []target{
		{"fleet", "pushed", w.pushMember("fleet", "pushed", "stories=yes")},
		{"fleet", "pulled", w.pullMember("fleet", "pulled", "stories=yes")},
	}
	for name, test := range map[string]struct {
		signedCharts
		tampered, unsigned, wrongKey string
	}{
		"proven": {
			newProvenanceRepository(t, "proven"), "sha256 sum does not match for proven-0.2.0.tgz", "the chart has no provenance file",
			"signature made by unknown entity",
		},
		"cosigned": {newCosignedRegistry(t, "cosigned"), "it signs another artifact, not sha256:", "the chart has no cosign signature", "its cosign signature is not valid"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &chartProfile{world: w.forSubtest(t), name: name, targets: targets}
			p.wantVerification(test.signedCharts, test.tampered, test.unsigned, test.wrongKey)
		})
	}
}

func (p *chartProfile) wantVerification(charts signedCharts, tampered, unsigned, wrongKey string) {
	p.t.Helper()
	charts.publish("0.1.0", 0, false)
	charts.publish("0.2.0", 0, true)
	charts.publish("0.3.0", -1, false)
	charts.publish("0.4.0", 1, false)
	p.trust(charts, 0)
	deploy := func(version string) {
		p.chart = charts.chart(p.name)
		p.chart["chartVersion"] = version
		p.deploy(nil, nil)
	}
	deploy("0.1.0")
	p.awaitRevision(1)
	for version, reason := range map[string]string{"0.2.0": tampered, "0.3.0": unsigned, "0.4.0": wrongKey} {
		deploy(version)
		p.awaitFailure("FailedNonRetriable", "chart stories/"+p.name+" "+version, reason)
		p.wantChart(1, p.name+"-0.1.0")
	}
	deploy("0.4.0")
	p.awaitFailure(wrongKey)
	p.trust(charts, 1)
	p.awaitRevision(2)
	p.wantChart(2, p.name+"-0.4.0")
}

// trust writes the Secret with the public half of a key.
func (p *chartProfile) trust(charts signedCharts, key int) {
	p.t.Helper()
	name, value := charts.secret(key)
	p.apply(p.hub, fmt.Sprintf("{apiVersion: v1, kind: Secret, metadata: {namespace: default, name: %s}, data: {%s: %s}}\n",
		p.name, name, base64.StdEncoding.EncodeToString(value)))
}

// wantChart checks the revision and the chart of the last revision on the members.
func (p *chartProfile) wantChart(revision int, chart string) {
	p.t.Helper()
	for _, at := range p.targets {
		history, err := p.history(at)
		if err != nil {
			p.t.Fatal(err)
		}
		if last := history[len(history)-1]; last.Revision != revision || last.Chart != chart || last.Status != "deployed" {
			p.t.Errorf("the last revision on %s is %+v, want %d of %s", at.cluster, last, revision, chart)
		}
		p.kubectl(at.plane, "get", "deployment", p.name, "-n", p.name)
	}
}

// archives returns the archive of a version, and the archive that the signature is for.
func archives(t *testing.T, name, version string, tampered bool) (archive, signed []byte) {
	t.Helper()
	archive, err := examples.Chart{Name: name, Version: version}.Archive()
	if err != nil {
		t.Fatal(err)
	}
	if !tampered {
		return archive, archive
	}
	if signed, err = (examples.Chart{Name: name, Version: version, AppVersion: "9.9.9"}).Archive(); err != nil {
		t.Fatal(err)
	}
	return archive, signed
}

// provenanceRepository is a Helm repository with provenance files.
type provenanceRepository struct {
	t    *testing.T
	name string
	url  string
	keys []*openpgp.Entity

	mu    sync.Mutex // guards files
	files map[string][]byte
}

func newProvenanceRepository(t *testing.T, name string) *provenanceRepository {
	t.Helper()
	r := &provenanceRepository{t: t, name: name, files: map[string][]byte{}}
	for range 2 {
		key, err := openpgp.NewEntity("publisher", "", "publisher@example.com", &packet.Config{Algorithm: packet.PubKeyAlgoEdDSA})
		if err != nil {
			t.Fatal(err)
		}
		r.keys = append(r.keys, key)
	}
	server := httptest.NewServer(http.HandlerFunc(r.serve))
	t.Cleanup(server.Close)
	r.url = server.URL
	return r
}

func (r *provenanceRepository) serve(out http.ResponseWriter, in *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	content, ok := r.files[in.URL.Path]
	if !ok {
		http.NotFound(out, in)
		return
	}
	_, _ = out.Write(content) // the hub reports a failed request
}

func (r *provenanceRepository) publish(version string, key int, tampered bool) {
	r.t.Helper()
	archive, signed := archives(r.t, r.name, version, tampered)
	file := fmt.Sprintf("%s-%s.tgz", r.name, version)
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.files) == 0 {
		r.files["/index.yaml"] = fmt.Appendf(nil, "apiVersion: v1\nentries:\n  %s:\n", r.name)
	}
	r.files["/index.yaml"] = fmt.Appendf(r.files["/index.yaml"], "  - {version: %s, urls: [%s]}\n", version, file)
	r.files["/"+file] = archive
	if key < 0 {
		return
	}
	text, err := (&provenance.Signatory{Entity: r.keys[key]}).ClearSign(signed, file, fmt.Appendf(nil, "name: %s\nversion: %s\n", r.name, version))
	if err != nil {
		r.t.Fatal(err)
	}
	r.files["/"+file+".prov"] = []byte(text)
}

func (r *provenanceRepository) secret(key int) (name string, value []byte) {
	r.t.Helper()
	var keyring bytes.Buffer
	if err := r.keys[key].Serialize(&keyring); err != nil {
		r.t.Fatal(err)
	}
	return "keyring.gpg", keyring.Bytes()
}

func (r *provenanceRepository) chart(name string) map[string]any {
	return map[string]any{
		"repositoryURL": r.url,
		"provenanceVerification": map[string]any{
			"keyringSecretRef": map[string]any{"namespace": "default", "name": name},
		},
	}
}

// cosignedRegistry is an OCI registry with cosign signatures.
type cosignedRegistry struct {
	t    *testing.T
	name string
	host string
	keys []*ecdsa.PrivateKey
}

func newCosignedRegistry(t *testing.T, name string) *cosignedRegistry {
	t.Helper()
	r := &cosignedRegistry{t: t, name: name}
	for range 2 {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		r.keys = append(r.keys, key)
	}
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	r.host = strings.TrimPrefix(server.URL, "http://")
	return r
}

// push stores an artifact with one layer under a tag and returns the digest of its manifest.
func (r *cosignedRegistry) push(tag, mediaType string, content []byte, annotations map[string]string) string {
	r.t.Helper()
	repository, err := remote.NewRepository(r.host + "/charts/" + r.name)
	if err != nil {
		r.t.Fatal(err)
	}
	repository.PlainHTTP = true
	layer, err := oras.PushBytes(r.t.Context(), repository, mediaType, content)
	if err != nil {
		r.t.Fatal(err)
	}
	layer.Annotations = annotations
	manifest, err := oras.PackManifest(r.t.Context(), repository, oras.PackManifestVersion1_1, "application/vnd.cncf.helm.config.v1+json",
		oras.PackManifestOptions{Layers: []ocispec.Descriptor{layer}})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := repository.Tag(r.t.Context(), manifest, tag); err != nil {
		r.t.Fatal(err)
	}
	return manifest.Digest.String()
}

func (r *cosignedRegistry) publish(version string, key int, tampered bool) {
	r.t.Helper()
	const chart = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
	archive, signed := archives(r.t, r.name, version, tampered)
	digest := r.push(version, chart, archive, nil)
	if key < 0 {
		return
	}
	signs := digest
	if tampered {
		signs = r.push("signed", chart, signed, nil)
	}
	payload := fmt.Appendf(nil, `{"critical":{"identity":{"docker-reference":"charts/%s"},"image":{"docker-manifest-digest":%q},`+
		`"type":"cosign container image signature"},"optional":null}`, r.name, signs)
	sum := sha256.Sum256(payload)
	signature, err := ecdsa.SignASN1(rand.Reader, r.keys[key], sum[:])
	if err != nil {
		r.t.Fatal(err)
	}
	r.push(strings.Replace(digest, ":", "-", 1)+".sig", "application/vnd.dev.cosign.simplesigning.v1+json", payload,
		map[string]string{"dev.cosignproject.cosign/signature": base64.StdEncoding.EncodeToString(signature)})
}

func (r *cosignedRegistry) secret(key int) (name string, value []byte) {
	r.t.Helper()
	raw, err := x509.MarshalPKIXPublicKey(r.keys[key].Public())
	if err != nil {
		r.t.Fatal(err)
	}
	return "cosign.pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: raw})
}

func (r *cosignedRegistry) chart(name string) map[string]any {
	return map[string]any{
		"repositoryURL":             "oci://" + r.host + "/charts",
		"registryCredentialsConfig": map[string]any{"plainHTTP": true},
		"signatureVerification": map[string]any{
			"provider": "PublicKey", "secretRef": map[string]any{"namespace": "default", "name": name},
		},
	}
}
