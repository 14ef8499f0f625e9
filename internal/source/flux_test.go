package source_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clocktesting "k8s.io/utils/clock/testing"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/source"
)

// fluxHub is a reader of Flux sources, and the server of their artifacts.
type fluxHub struct {
	t      *testing.T
	server *countingServer
	url    string
	clock  *clocktesting.FakePassiveClock
	dir    string

	mu      sync.Mutex // guards objects
	objects map[source.Reference]*unstructured.Unstructured
}

func newFluxHub(t *testing.T) *fluxHub {
	t.Helper()
	h := &fluxHub{
		t: t, server: newCountingServer(http.NotFoundHandler()), clock: clocktesting.NewFakePassiveClock(time.Unix(0, 0)), dir: t.TempDir(),
		objects: map[source.Reference]*unstructured.Unstructured{},
	}
	h.url = serve(t, h.server)
	return h
}

// contents returns the Contents of a hub that has just started.
func (h *fluxHub) contents() *source.Contents {
	h.t.Helper()
	artifacts, err := source.NewArtifacts(h.dir, h.clock)
	if err != nil {
		h.t.Fatal(err)
	}
	artifacts.Objects = func(_ context.Context, ref source.Reference) (*unstructured.Unstructured, error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if object, ok := h.objects[ref]; ok {
			return object, nil
		}
		return nil, apierrors.NewNotFound(schema.GroupResource{}, ref.Name)
	}
	return &source.Contents{Artifacts: artifacts}
}

var app = source.Reference{Kind: "GitRepository", Namespace: "eu", Name: "app"}

// set creates or changes the source app.
func (h *fluxHub) set(yaml map[string]any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.objects[app] = &unstructured.Unstructured{Object: yaml}
}

// publish sets raw as the artifact of the source app.
func (h *fluxHub) publish(revision string, raw []byte) {
	path := "/gitrepository/eu/app/" + revision + ".tar.gz"
	h.server.setHandler(at(map[string]string{path: string(raw)}))
	h.set(withArtifact(h.url+path, fmt.Sprintf("sha256:%x", sha256.Sum256(raw))))
}

func withArtifact(url, digest string) map[string]any {
	return map[string]any{"status": map[string]any{"artifact": map[string]any{"url": url, "digest": digest}}}
}

// tarball returns an archive of files like source-controller.
func tarball(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var buffer bytes.Buffer
	zipped := gzip.NewWriter(&buffer)
	writer := tar.NewWriter(zipped)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		err := writer.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, Size: int64(len(files[name]))})
		if err == nil {
			_, err = writer.Write([]byte(files[name]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(writer.Close(), zipped.Close()); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

func appRef(path string) libv1beta1.PolicyRef {
	return libv1beta1.PolicyRef{Kind: libv1beta1.SourceGitRepository, Namespace: "eu", Name: "app", Path: path}
}

func TestManifestsOfAFluxSource(t *testing.T) {
	t.Parallel()
	h := newFluxHub(t)
	h.publish("one", tarball(t, map[string]string{
		"readme.md": "r", "root.yaml": "0", "web/b.yml": "2", "web/a.json": "1", "web/kustomization.yaml": "k", "web/sub/c.yaml": "3",
		"web/sub/Kustomization": "k", "web/sub/kustomization.yml": "k", "website/d.yaml": "4", "test/e.yaml": "5", "empty/.gitkeep": "",
	}))
	contents := h.contents()
	for path, want := range map[string][]string{
		"":                                   {"root.yaml", "test/e.yaml", "web/a.json", "web/b.yml", "web/sub/c.yaml", "website/d.yaml"},
		"./":                                 {"root.yaml", "test/e.yaml", "web/a.json", "web/b.yml", "web/sub/c.yaml", "website/d.yaml"},
		"web":                                {"web/a.json", "web/b.yml", "web/sub/c.yaml"},
		"./web/":                             {"web/a.json", "web/b.yml", "web/sub/c.yaml"},
		"/web":                               {"web/a.json", "web/b.yml", "web/sub/c.yaml"},
		"web/sub/../b/":                      nil,
		"web/b.yml":                          {"web/b.yml"},
		"{{ .Cluster.metadata.labels.env }}": {"test/e.yaml"},
		"empty":                              nil,
		"we":                                 nil,
		"../elsewhere":                       nil,
	} {
		got, err := contents.Manifests(t.Context(), appRef(path), templateContext())
		if want == nil {
			wantInvalid(t, err, "GitRepository eu/app")
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", path, err)
			continue
		}
		names := []string{}
		for _, file := range got.Files {
			names = append(names, file.Name)
		}
		if diff := cmp.Diff(want, names); diff != "" || got.Reference != app || got.Sensitive || got.Template {
			t.Errorf("%q: got %+v (-want +got):\n%s", path, got.Reference, diff)
		}
	}
	_, err := contents.Manifests(t.Context(), appRef("we"), templateContext())
	wantInvalid(t, err, `GitRepository eu/app has no directory "we"`)
	if got := h.server.countRequests("/gitrepository/eu/app/one.tar.gz"); got != 1 {
		t.Errorf("the artifact was requested %d times, want 1", got)
	}
}

func TestArtifactIsDownloadedOnceForAll(t *testing.T) {
	t.Parallel()
	h := newFluxHub(t)
	h.publish("one", tarball(t, map[string]string{"a.yaml": "1"}))
	contents := h.contents()
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			_, err := awaitResult(func() (source.Content, error) { return contents.Manifests(t.Context(), appRef(""), templateContext()) })
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if got := h.server.countRequests("/gitrepository/eu/app/one.tar.gz"); got != 1 {
		t.Errorf("the artifact was requested %d times, want 1", got)
	}
	// After a restart, the hub reads the artifact from the directory, without the server.
	h.server.setHandler(http.NotFoundHandler())
	if _, err := h.contents().Manifests(t.Context(), appRef(""), templateContext()); err != nil || h.server.countRequests("/gitrepository/eu/app/one.tar.gz") != 1 {
		t.Errorf("after a restart: got %v and %d requests, want 1", err, h.server.countRequests("/gitrepository/eu/app/one.tar.gz"))
	}
	h.publish("two", tarball(t, map[string]string{"a.yaml": "2"}))
	if got, err := contents.Manifests(t.Context(), appRef(""), templateContext()); err != nil || string(got.Files[0].Data) != "2" {
		t.Errorf("the second revision: got %+v, %v", got, err)
	}
}

// TestStoredArtifactIsVerified replaces the stored archive by another valid archive. After a restart, the hub must not
// use it as the content of the digest.
func TestStoredArtifactIsVerified(t *testing.T) {
	t.Parallel()
	h := newFluxHub(t)
	h.publish("one", tarball(t, map[string]string{"a.yaml": "one"}))
	if _, err := h.contents().Manifests(t.Context(), appRef(""), source.TemplateContext{}); err != nil {
		t.Fatal(err)
	}
	stored, err := filepath.Glob(filepath.Join(h.dir, "*"))
	if err != nil || len(stored) != 1 {
		t.Fatalf("stored files: %v, %v", stored, err)
	}
	if err := os.WriteFile(stored[0], tarball(t, map[string]string{"a.yaml": "of another source"}), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := h.contents().Manifests(t.Context(), appRef(""), source.TemplateContext{})
	if err != nil || len(got.Files) != 1 || string(got.Files[0].Data) != "one" {
		t.Errorf("got %q, %v", got.Files, err)
	}
	// The server also has the other archive.
	h.set(withArtifact(h.url+"/gitrepository/eu/app/one.tar.gz", "sha256:"+strings.Repeat("0", 64)))
	if got, err := h.contents().Manifests(t.Context(), appRef(""), source.TemplateContext{}); err == nil || len(got.Files) > 0 {
		t.Errorf("content with another digest: got %q, %v", got.Files, err)
	}
}

func TestAnnotationsOfAFluxSource(t *testing.T) {
	t.Parallel()
	h := newFluxHub(t)
	h.publish("one", tarball(t, map[string]string{"a.yaml": "1"}))
	contents := h.contents()
	h.objects[app].SetAnnotations(map[string]string{libv1beta1.TemplateAnnotation: "ok"})
	if got, err := contents.Manifests(t.Context(), appRef(""), templateContext()); err != nil || !got.Template {
		t.Errorf("got %+v, %v, want templates", got, err)
	}
	h.objects[app].SetAnnotations(map[string]string{libv1beta1.LuaAnnotation: "ok"})
	if got, err := contents.Manifests(t.Context(), appRef(""), templateContext()); err != nil || !got.Lua || got.Template {
		t.Errorf("got %+v, %v, want scripts", got, err)
	}
	h.objects[app].SetAnnotations(map[string]string{libv1beta1.LuaAnnotation: "ok", libv1beta1.TemplateAnnotation: "ok"})
	_, err := contents.Manifests(t.Context(), appRef(""), templateContext())
	wantInvalid(t, err, "GitRepository eu/app", libv1beta1.LuaAnnotation)
}

func TestFluxSourceWithoutAnArtifact(t *testing.T) {
	t.Parallel()
	h := newFluxHub(t)
	contents, optional := h.contents(), appRef("web")
	optional.Optional = true
	_, err := contents.Manifests(t.Context(), appRef(""), templateContext())
	if wantTexts(t, err, "GitRepository eu/app does not exist"); !errors.Is(err, source.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
	if got, err := contents.Manifests(t.Context(), optional, templateContext()); err != nil || len(got.Files) > 0 {
		t.Errorf("optional: got %+v, %v", got, err)
	}
	ready := map[string]any{"type": "Ready", "status": "False", "message": "authentication required"}
	for want, object := range map[string]map[string]any{
		"GitRepository eu/app has no artifact: Flux's source-controller has not reported on it": {},
		"GitRepository eu/app has no artifact: authentication required":                         {"status": map[string]any{"conditions": []any{ready}}},
		"GitRepository eu/app has no artifact: it is suspended":                                 {"spec": map[string]any{"suspend": true}},
	} {
		h.set(object)
		_, err := contents.Manifests(t.Context(), optional, templateContext())
		if wantTexts(t, err, want); err.Error() != want {
			t.Errorf("got %q, want %q", err, want)
		}
	}
	// The hub uses an artifact also if the source is suspended or not ready.
	h.publish("one", tarball(t, map[string]string{"web/a.yaml": "1"}))
	object := h.objects[app].Object
	object["spec"] = map[string]any{"suspend": true}
	object["status"].(map[string]any)["conditions"] = []any{ready}
	if got, err := contents.Manifests(t.Context(), optional, templateContext()); err != nil || len(got.Files) != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
	restricted := templateContext()
	restricted.RestrictedNamespace = "other"
	_, err = contents.Manifests(t.Context(), appRef(""), restricted)
	wantInvalid(t, err, "GitRepository eu/app", "own namespace other")
}

func TestArtifactsAreVerified(t *testing.T) {
	t.Parallel()
	h := newFluxHub(t)
	raw := tarball(t, map[string]string{"a.yaml": "1"})
	link := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/good", http.StatusFound) })
	h.server.setHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/moved":
			link(w, r)
		case "/text":
			_, _ = w.Write([]byte("text"))
		case "/good":
			_, _ = w.Write(raw)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	digest256 := fmt.Sprintf("sha256:%x", sha256.Sum256(raw))
	for name, test := range map[string]struct{ url, digest, want string }{
		"sha256":       {h.url + "/good", digest256, ""},
		"sha384":       {h.url + "/good", fmt.Sprintf("sha384:%x", sha512.Sum384(raw)), ""},
		"sha512":       {h.url + "/good", fmt.Sprintf("sha512:%x", sha512.Sum512(raw)), ""},
		"other bytes":  {h.url + "/good", fmt.Sprintf("sha256:%x", sha256.Sum256(nil)), h.url + "/good: its digest is " + digest256},
		"md5":          {h.url + "/good", "md5:abc", `"md5:abc" is not of sha256`},
		"no digest":    {h.url + "/good", "", `its digest "" is not of sha256`},
		"missing":      {h.url + "/missing", digest256, "/missing: the server returned 404"},
		"redirect":     {h.url + "/moved", digest256, "/moved: the server returned 302"},
		"no archive":   {h.url + "/text", fmt.Sprintf("sha256:%x", sha256.Sum256([]byte("text"))), "neither a tar nor a zip archive"},
		"credentials":  {strings.Replace(h.url, "http://", "http://me:s3cret@", 1) + "/missing?token=s3cret", digest256, h.url + "/missing: the server returned 404"},
		"other scheme": {"file:///etc/passwd", digest256, "its URL is not a URL with http or https"},
	} {
		t.Run(name, func(t *testing.T) {
			h.dir = t.TempDir()
			h.set(withArtifact(test.url, test.digest))
			got, err := h.contents().Manifests(t.Context(), appRef(""), templateContext())
			if test.want == "" {
				if err != nil || len(got.Files) != 1 {
					t.Errorf("got %+v, %v", got, err)
				}
				return
			}
			wantTexts(t, err, "GitRepository eu/app", test.want)
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("the error has a password: %v", err)
			}
		})
	}
}

func TestFailingArtifactIsRetriedWithPauses(t *testing.T) {
	t.Parallel()
	h := newFluxHub(t)
	h.publish("one", tarball(t, map[string]string{"a.yaml": "1"}))
	h.server.setHandler(http.NotFoundHandler())
	contents := h.contents()
	requests := func(path string) int { return h.server.countRequests("/gitrepository/eu/app/" + path + ".tar.gz") }
	read := func() error {
		_, err := contents.Manifests(t.Context(), appRef(""), templateContext())
		return err
	}
	for range 20 {
		wantTexts(t, read(), "the server returned 404 Not Found")
	}
	if got := requests("one"); got != 1 {
		t.Errorf("20 callers sent %d requests, want 1", got)
	}
	h.clock.SetTime(time.Unix(11, 0))
	wantTexts(t, read(), "404")
	if got := requests("one"); got != 2 {
		t.Errorf("after the pause: got %d requests, want 2", got)
	}
	h.publish("two", tarball(t, map[string]string{"a.yaml": "2"}))
	if err := read(); err != nil || requests("two") != 1 {
		t.Errorf("a new revision: got %v and %d requests, want the new revision at once", err, requests("two"))
	}
}

func TestCallersDoNotWaitForSlowArtifact(t *testing.T) {
	t.Parallel()
	h := newFluxHub(t)
	h.publish("one", tarball(t, map[string]string{"a.yaml": "1"}))
	answer, inner := make(chan struct{}), h.server.handler
	h.server.setHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		<-answer
		inner.ServeHTTP(w, r)
	}))
	contents := h.contents()
	read := func() error {
		_, err := contents.Manifests(t.Context(), appRef(""), templateContext())
		return err
	}
	_, isPending := errors.AsType[*source.PendingError](read())
	close(answer)
	if !isPending {
		t.Error("got no PendingError")
	}
	for err := read(); err != nil; err = read() {
		if _, isPending := errors.AsType[*source.PendingError](err); !isPending {
			t.Fatal(err)
		}
	}
	if got := h.server.countRequests("/gitrepository/eu/app/one.tar.gz"); got != 1 {
		t.Errorf("the artifact was requested %d times, want 1", got)
	}
}
