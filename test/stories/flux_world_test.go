package stories

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/md5"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/registry/remote"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/archive"
)

// fluxFiles are the content of a source: two directories with manifests, a kustomization, and a chart. The files of
// kustomize are not manifests. The names of the objects and of the chart begin with the name of the source.
func (w *world) fluxFiles(name, text string) map[string]string {
	w.t.Helper()
	files := map[string]string{
		"README.md":                    "not a manifest\n",
		"apps/web/one.yaml":            fluxManifest(name+"-web", text),
		"apps/web/kustomization.yaml":  "resources: [one.yaml]\n",
		"apps/db/nested/two.json":      fmt.Sprintf(`{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "flux-content", "name": "%s-db"}, "data": {"text": %q}}`, name, text),
		"unused/not-for-this-one.yaml": fluxManifest(name+"-unused", text),

		"kustomized/overlay/kustomization.yaml": "resources: [../base]\nnamePrefix: " + name + "-\n",
		"kustomized/base/kustomization.yaml":    "resources: [kustomized.yaml]\n",
		"kustomized/base/kustomized.yaml":       fluxManifest("kustomized", text),
	}
	packaged, err := examples.Chart{Name: name}.Archive()
	if err != nil {
		w.t.Fatal(err)
	}
	chart, err := archive.Read(packaged, archive.DefaultLimits())
	if err != nil {
		w.t.Fatal(err)
	}
	for file, raw := range chart {
		files["charts/"+file] = string(raw)
	}
	files["charts/"+name+"/templates/flux.yaml"] = fluxManifest(name+"-chart", text)
	return files
}

// fluxManifest is a ConfigMap in namespace flux-content.
func fluxManifest(name, text string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: flux-content, name: %s}\ndata: {text: %q}\n", name, text)
}

// ociRepository is a repository in a registry over plain HTTP.
type ociRepository struct {
	*world

	url    string
	target *remote.Repository
}

func (w *world) newOCIRepository(repository string) *ociRepository {
	w.t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	w.t.Cleanup(server.Close)
	address := strings.TrimPrefix(server.URL, "http://") + "/" + repository
	target, err := remote.NewRepository(address + ":latest")
	if err != nil {
		w.t.Fatal(err)
	}
	target.PlainHTTP = true
	return &ociRepository{world: w, url: "oci://" + address, target: target}
}

// push pushes an artifact with files, with the tag latest.
func (r *ociRepository) push(files map[string]string) {
	r.t.Helper()
	layer, err := oras.PushBytes(r.t.Context(), r.target, "application/vnd.cncf.flux.content.v1.tar+gzip", r.tarball(files))
	if err != nil {
		r.t.Fatal(err)
	}
	manifest, err := oras.PackManifest(r.t.Context(), r.target, oras.PackManifestVersion1_1, "application/vnd.cncf.flux.config.v1+json",
		oras.PackManifestOptions{Layers: []ocispec.Descriptor{layer}})
	if err == nil {
		err = r.target.Tag(r.t.Context(), manifest, "latest")
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// tarball returns files as a gzipped tar archive.
func (w *world) tarball(files map[string]string) []byte {
	w.t.Helper()
	var buffer bytes.Buffer
	zipped := gzip.NewWriter(&buffer)
	writer := tar.NewWriter(zipped)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		err := writer.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, Size: int64(len(files[name]))})
		if err == nil {
			_, err = writer.Write([]byte(files[name]))
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
	if err := errors.Join(writer.Close(), zipped.Close()); err != nil {
		w.t.Fatal(err)
	}
	return buffer.Bytes()
}

// bucketServer serves one bucket with the four requests of S3 that source-controller sends.
type bucketServer struct {
	bucket, address string

	mu    sync.Mutex // guards files
	files map[string]string
}

func (w *world) newBucketServer(bucket string) *bucketServer {
	w.t.Helper()
	s := &bucketServer{bucket: bucket}
	server := httptest.NewServer(s)
	w.t.Cleanup(server.Close)
	s.address = strings.TrimPrefix(server.URL, "http://")
	return s
}

// put replaces the objects.
func (s *bucketServer) put(files map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files = files
}

// ServeHTTP implements http.Handler.
func (s *bucketServer) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	etag := func(text string) string { return fmt.Sprintf("%x", md5.Sum([]byte(text))) }
	when := time.Unix(1_700_000_000, 0).UTC()
	key := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/"+s.bucket), "/")
	text, isObject := s.files[key]
	switch {
	case r.URL.Query().Has("location"):
		_, _ = fmt.Fprint(rw, `<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"></LocationConstraint>`)
	case isObject:
		rw.Header().Set("ETag", `"`+etag(text)+`"`)
		http.ServeContent(rw, r, key, when, strings.NewReader(text))
	case key != "":
		rw.WriteHeader(http.StatusNotFound)
		_, _ = fmt.Fprint(rw, `<Error><Code>NoSuchKey</Code></Error>`)
	case r.Method == http.MethodGet:
		var list bytes.Buffer
		for name, text := range s.files {
			fmt.Fprintf(&list, "<Contents><Key>%s</Key><LastModified>%s</LastModified><ETag>&quot;%s&quot;</ETag><Size>%d</Size></Contents>", name, when.Format(time.RFC3339), etag(text), len(text))
		}
		_, _ = fmt.Fprintf(rw, `<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>%s</Name><KeyCount>%d</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>%s</ListBucketResult>`, s.bucket, len(s.files), list.String())
	}
}

// startSourceController runs Flux's source-controller for the hub.
func (w *world) startSourceController() *process {
	w.t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(w.t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	storage := listener.Addr().String()
	_ = listener.Close() // the source-controller listens there
	dir := filepath.Join(w.dir, "storage")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		w.t.Fatal(err)
	}
	return w.start("source-controller", w.hub, "source-controller", "--storage-path="+dir, "--storage-addr="+storage, "--storage-adv-addr="+storage,
		"--metrics-addr=127.0.0.1:0", "--health-addr=127.0.0.1:0", "--events-addr=", "--enable-leader-election=false", "--interval-jitter-percentage=0", "--log-level=info")
}

// fluxCRDs returns the directory with the CRDs of the source-controller that is in use.
var fluxCRDs = sync.OnceValues(func() (string, error) {
	cmd := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/fluxcd/source-controller")
	cmd.Dir = filepath.Join("..", "flux")
	dir, err := output(cmd)
	return filepath.Join(strings.TrimSpace(dir), "config", "crd", "bases"), err
})

// installFlux installs the CRDs of Flux's sources on the hub.
func (w *world) installFlux() {
	w.t.Helper()
	dir, err := fluxCRDs()
	if err != nil {
		w.t.Fatal(err)
	}
	w.kubectl(w.hub, "apply", "--server-side", "-f", dir)
	w.kubectl(w.hub, "wait", "--for=condition=Established", "crd", "--all")
}
