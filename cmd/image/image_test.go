package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/content/oci"
	"oras.land/oras-go/v2/registry/remote"
)

// writeText is a compiler that writes a text file.
func writeText(_ context.Context, platform, command, file string) error {
	return os.WriteFile(file, []byte(command+" for "+platform), 0o600)
}

// testOptions returns options that write an image to a temporary file.
func testOptions(t *testing.T, reference string) options {
	t.Helper()
	certificates := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(certificates, []byte("authorities"), 0o600); err != nil {
		t.Fatal(err)
	}
	license := filepath.Join(t.TempDir(), "LICENSE")
	if err := os.WriteFile(license, []byte("terms"), 0o600); err != nil {
		t.Fatal(err)
	}
	return options{
		reference: reference, licenses: []string{license}, platforms: []string{"linux/amd64", "linux/arm64"}, certificates: certificates,
		archive: filepath.Join(t.TempDir(), "dist", "image.tar"),
	}
}

func TestArchiveHoldsAnImagePerPlatform(t *testing.T) {
	t.Parallel()
	o := testOptions(t, "registry.example.com/team/towline:v1")
	if err := o.build(t.Context(), writeText); err != nil {
		t.Fatal(err)
	}
	store, err := oci.NewFromTar(t.Context(), o.archive)
	if err != nil {
		t.Fatal(err)
	}
	root, err := store.Resolve(t.Context(), "v1")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := root.Annotations[containerdName], "registry.example.com/team/towline:v1"; got != want {
		t.Errorf("name for containerd %q, want %q", got, want)
	}
	var index ocispec.Index
	fetch(t, store, root, &index)
	if len(index.Manifests) != 2 {
		t.Fatalf("%d manifests, want 2", len(index.Manifests))
	}
	for i, platform := range []ocispec.Platform{{OS: "linux", Architecture: "amd64"}, {OS: "linux", Architecture: "arm64"}} {
		if diff := cmp.Diff(&platform, index.Manifests[i].Platform); diff != "" {
			t.Errorf("platform of manifest %d (-want +got):\n%s", i, diff)
		}
		checkImage(t, store, index.Manifests[i], platform)
	}
}

// checkImage checks the image of one platform as a container runtime reads it.
func checkImage(t *testing.T, store content.Fetcher, descriptor ocispec.Descriptor, platform ocispec.Platform) {
	t.Helper()
	var (
		manifest ocispec.Manifest
		image    ocispec.Image
	)
	fetch(t, store, descriptor, &manifest)
	fetch(t, store, manifest.Config, &image)
	if diff := cmp.Diff(platform, image.Platform); diff != "" {
		t.Errorf("platform (-want +got):\n%s", diff)
	}
	if image.Config.User != "65532:65532" {
		t.Errorf("user %q", image.Config.User)
	}
	if diff := cmp.Diff([]string{"/manager"}, image.Config.Entrypoint); diff != "" {
		t.Errorf("entrypoint (-want +got):\n%s", diff)
	}
	compressed, err := content.FetchAll(t.Context(), store, manifest.Layers[0])
	if err != nil {
		t.Fatal(err)
	}
	zipped, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := io.ReadAll(zipped)
	if err != nil {
		t.Fatal(err)
	}
	if got := image.RootFS.DiffIDs[0].Algorithm().FromBytes(raw); got != image.RootFS.DiffIDs[0] {
		t.Errorf("diff id %s, content has %s", image.RootFS.DiffIDs[0], got)
	}
	want := []string{
		"manager -rwxr-xr-x towline-agent for linux/" + platform.Architecture,
		"towline -rwxr-xr-x towline for linux/" + platform.Architecture,
		"bin/karmada-agent -> /manager",
		"licenses/LICENSE -rw-r--r-- terms",
		"etc/ssl/certs/ca-certificates.crt -rw-r--r-- authorities",
	}
	if diff := cmp.Diff(want, listed(t, raw)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

// listed describes the entries of a tar.
func listed(t *testing.T, raw []byte) []string {
	t.Helper()
	var entries []string
	for reader := tar.NewReader(bytes.NewReader(raw)); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return entries
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(reader)
		if err != nil {
			t.Fatal(err)
		}
		entry := fmt.Sprintf("%s %s %s", header.Name, header.FileInfo().Mode(), text)
		if header.Typeflag == tar.TypeSymlink {
			entry = header.Name + " -> " + header.Linkname
		}
		entries = append(entries, entry)
	}
}

func fetch(t *testing.T, store content.Fetcher, descriptor ocispec.Descriptor, into any) {
	t.Helper()
	raw, err := content.FetchAll(t.Context(), store, descriptor)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		t.Fatal(err)
	}
}

func TestSameSourceSameArchive(t *testing.T) {
	t.Parallel()
	var archives [2][]byte
	for i := range archives {
		o := testOptions(t, "towline:v1")
		if err := o.build(t.Context(), writeText); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(o.archive)
		if err != nil {
			t.Fatal(err)
		}
		archives[i] = raw
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("two archives of the same source differ")
	}
}

func TestPushedImageIsTheArchived(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(t.Output(), "", 0))))
	t.Cleanup(server.Close)
	name := strings.TrimPrefix(server.URL, "http://") + "/team/towline"
	o := testOptions(t, name+":v1")
	o.push, o.plainHTTP = true, true
	if err := o.build(t.Context(), writeText); err != nil {
		t.Fatal(err)
	}
	repository, err := remote.NewRepository(name)
	if err != nil {
		t.Fatal(err)
	}
	repository.PlainHTTP = true
	pushed, err := repository.Resolve(t.Context(), "v1")
	if err != nil {
		t.Fatal(err)
	}
	archive, err := oci.NewFromTar(t.Context(), o.archive)
	if err != nil {
		t.Fatal(err)
	}
	archived, err := archive.Resolve(t.Context(), "v1")
	if err != nil {
		t.Fatal(err)
	}
	if pushed.Digest != archived.Digest {
		t.Errorf("pushed %s, archived %s", pushed.Digest, archived.Digest)
	}
	var index ocispec.Index
	fetch(t, repository, pushed, &index)
	checkImage(t, repository, index.Manifests[1], ocispec.Platform{OS: "linux", Architecture: "arm64"})
}

func TestFailedBuildLeavesNoArchive(t *testing.T) {
	t.Parallel()
	broken := errors.New("syntax error")
	o := testOptions(t, "towline:v1")
	if err := o.build(t.Context(), func(context.Context, string, string, string) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("got error %v, want %v", err, broken)
	}
	if _, err := os.Stat(o.archive); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("archive: %v, want none", err)
	}
}

func TestSplitReference(t *testing.T) {
	t.Parallel()
	for reference, want := range map[string]string{
		"towline:v1":                      "docker.io/library/towline:v1",
		"team/towline:v1":                 "docker.io/team/towline:v1",
		"localhost/towline:v1":            "localhost/towline:v1",
		"registry:5000/towline:v1":        "registry:5000/towline:v1",
		"registry.example.com/a/b:latest": "registry.example.com/a/b:latest",
		"towline":                         "",
		"registry:5000/towline":           "",
		"towline:":                        "",
		"Towline:v1":                      "",
		"towline:v1+dirty":                "",
	} {
		name, tag, err := splitReference(reference)
		got := ""
		if err == nil {
			got = qualifiedName(name) + ":" + tag
		}
		if got != want {
			t.Errorf("%s: got %q and error %v, want %q", reference, got, err, want)
		}
	}
}
