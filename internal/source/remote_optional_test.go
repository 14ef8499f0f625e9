package source_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/source"
)

func TestOptionalRemoteMayBeMissing(t *testing.T) {
	t.Parallel()
	server := serveFunc(t, http.NotFound)
	r := newRemoteRun(t)
	ref := remoteRef(server.URL)
	if _, err := r.read(ref); !errors.Is(err, source.ErrNotFound) || !strings.Contains(err.Error(), server.URL) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
	ref.Optional = true
	// After a restart, one failure must not delete the delivered content.
	_, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
	if _, isPending := errors.AsType[*source.PendingError](err); !isPending {
		t.Errorf("after one failure: got %v, want a PendingError", err)
	}
	r.advance(defaultInterval)
	r.awaitChange()
	got, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
	if err != nil || len(got.Files) > 0 {
		t.Errorf("got %v with %d files, want no content", err, len(got.Files))
	}
	// Servers use the same status for refused credentials.
	r.secrets.set("login", map[string]string{"token": "expired"})
	for name, ref := range map[string]libv1beta1.PolicyRef{
		"a token": withSecret(remoteRef(server.URL+"/token"), "login"), "a parameter": remoteRef(server.URL + "/parameter?token=expired"),
		"a token for a registry": withSecret(libv1beta1.PolicyRef{RemoteURL: &libv1beta1.RemoteURL{RemoteSource: libv1beta1.RemoteSource{
			URL: strings.Replace(server.URL, "http", "oci", 1) + "/app", PlainHTTP: true,
		}}}, "login"),
		"a token for a repository": withSecret(remoteRef("git+"+server.URL+"/app"), "login"),
	} {
		ref.Optional = true
		_, _ = r.read(ref)
		r.advance(time.Minute)
		r.awaitChange()
		if got, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx); err == nil || errors.Is(err, source.ErrNotFound) || !strings.Contains(err.Error(), "404 Not Found, which") {
			t.Errorf("with %s: got %d files, %v, want an error", name, len(got.Files), err)
		}
	}
	// A missing Secret is an error also for an optional reference.
	ref = withSecret(ref, "missing")
	if _, err := r.read(ref); err == nil || !strings.Contains(err.Error(), "eu/missing") {
		t.Errorf("got %v, want an error about the Secret", err)
	}
}

// TestPathOfARemoteArchive uses a directory of an archive. The digests of two directories with equal files are
// different.
func TestPathOfARemoteArchive(t *testing.T) {
	t.Parallel()
	packed := tarGz(t, map[string]string{"README.md": "r", "eu/a.yaml": "1", "eu/kustomization.yaml": "k", "test/a.yaml": "1"})
	server := serveFunc(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(packed) })
	r := newRemoteRun(t)
	ref := remoteRef(server.URL + "/all.tgz")
	if got, err := r.read(ref); err != nil || len(got.Files) != 2 {
		t.Fatalf("got %v, %v", filesOf(got), err)
	}
	digests := map[string]bool{}
	for path, want := range map[string]string{"eu": "eu/a.yaml", "/{{ .Cluster.metadata.labels.env }}/": "test/a.yaml"} {
		ref.Path = path
		got, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
		if diff := cmp.Diff(map[string]string{want: "1"}, filesOf(got)); err != nil || diff != "" {
			t.Errorf("path %q: %v (-want +got):\n%s", path, err, diff)
		}
		digests[got.Digest] = true
	}
	if len(digests) != 2 {
		t.Errorf("the digests are %v", digests)
	}
	for path, want := range map[string]string{"asia": `has no directory "asia"`, "../eu": "is not a path below the root", "README.md": `no file that ends in .yaml, .yml or .json below "README.md"`} {
		ref.Path = path
		_, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
		wantInvalid(t, err, "URL "+server.URL+"/all.tgz", want)
	}
}
