package source_test

import (
	"errors"
	"io"
	"log"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/source"
)

// artifactRegistry serves an OCI registry with a login. blobs counts the blobs that it serves.
func artifactRegistry(t *testing.T) (host string, blobs *atomic.Int64) {
	t.Helper()
	blobs = &atomic.Int64{}
	handler := withPassword(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	server := serveFunc(t, func(w http.ResponseWriter, in *http.Request) {
		if in.Method == http.MethodGet && strings.Contains(in.URL.Path, "/blobs/") {
			blobs.Add(1)
		}
		handler.ServeHTTP(w, in)
	})
	return strings.TrimPrefix(server.URL, "http://"), blobs
}

func artifactRef(address string) libv1beta1.PolicyRef {
	ref := withSecret(withInterval(remoteRef(address), time.Minute), "login")
	ref.RemoteURL.PlainHTTP = true
	return ref
}

func TestRemoteReadsArtifacts(t *testing.T) {
	t.Parallel()
	host, blobs := artifactRegistry(t)
	tree := map[string]string{"a/b.yaml": "one", "README.md": "text"}
	flux := push(t, host+"/flux:1.0.0", tarGz(t, tree), "application/vnd.cncf.flux.content.v1.tar+gzip")
	pushArtifact(t, host+"/oras:latest", nil,
		blob{mediaType: "application/yaml", content: []byte("one"), annotations: map[string]string{ocispec.AnnotationTitle: "web/one.yaml"}},
		blob{mediaType: "application/yaml", content: []byte("two")})
	pushArtifact(t, host+"/leaves:latest", nil,
		blob{mediaType: "application/yaml", content: []byte("one"), annotations: map[string]string{ocispec.AnnotationTitle: "../one.yaml"}})
	for name, test := range map[string]struct {
		address string
		want    map[string]string
		err     string
	}{
		"tag":        {address: "/flux:1.0.0", want: map[string]string{"a/b.yaml": "one"}},
		"digest":     {address: "/flux@" + flux.Digest.String(), want: map[string]string{"a/b.yaml": "one"}},
		"files":      {address: "/oras", want: map[string]string{"web/one.yaml": "one", "layer-1.yaml": "two"}},
		"no tag":     {address: "/flux:2.0.0", err: "404 Not Found, which"},
		"other path": {address: "/leaves", err: `"../one.yaml" is not a path below the root`},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRemoteRun(t)
			r.secrets.set("login", map[string]string{"username": "me", "password": "s:cret"})
			got, err := r.read(artifactRef("oci://" + host + test.address))
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("got %v, want %s", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, filesOf(got)); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
			before := blobs.Load()
			r.advance(time.Minute)
			eventually(t, r.clock.HasWaiters)
			if got := blobs.Load() - before; got != 0 {
				t.Errorf("%d blobs of an unchanged artifact were fetched", got)
			}
		})
	}
}

func TestRemoteFollowsTags(t *testing.T) {
	t.Parallel()
	host, _ := artifactRegistry(t)
	r := newRemoteRun(t)
	r.secrets.set("login", map[string]string{"username": "me", "password": "s:cret"})
	push(t, host+"/web:stable", tarGz(t, map[string]string{"a.yaml": "one"}), "application/vnd.cncf.flux.content.v1.tar+gzip")
	ref := artifactRef("oci://" + host + "/web:stable")
	if _, err := r.read(ref); err != nil {
		t.Fatal(err)
	}
	push(t, host+"/web:stable", tarGz(t, map[string]string{"a.yaml": "two"}), "application/vnd.cncf.flux.content.v1.tar+gzip")
	r.advance(time.Minute)
	r.awaitChange()
	got, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
	if err != nil || filesOf(got)["a.yaml"] != "two" {
		t.Errorf("got %v %v", filesOf(got), err)
	}
	r.secrets.set("login", map[string]string{"username": "me", "password": "wrong"})
	_, err = r.contents.Manifests(t.Context(), ref, r.tmplCtx)
	if _, ok := errors.AsType[*source.PendingError](err); !ok {
		t.Errorf("got %v, want a PendingError", err)
	}
	r.awaitChange()
	r.advance(time.Minute)
	r.awaitChange()
	if _, err = r.contents.Manifests(t.Context(), ref, r.tmplCtx); err == nil || !strings.Contains(err.Error(), "401 Unauthorized") {
		t.Errorf("with a wrong password: %v", err)
	}
}
