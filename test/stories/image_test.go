package stories

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/content/oci"
	"oras.land/oras-go/v2/registry/remote"
)

// platformsVariable is the environment variable with the platforms to build images for. The default is the platform of
// this machine.
const platformsVariable = "TOWLINE_PLATFORMS"

// releaseImage runs `make image` for a release of Towline and pushes the image to a registry. It returns the name of
// the image without its tag, and the file with the program that it pulled for this machine.
func (w *world) releaseImage(dist, version string) (image, program string) {
	w.t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	w.t.Cleanup(server.Close)
	image = strings.TrimPrefix(server.URL, "http://") + "/towline"
	own := "linux/" + runtime.GOARCH
	platforms := cmp.Or(os.Getenv(platformsVariable), own)
	w.runMake("image", "IMAGE="+image, "VERSION="+version, "PLATFORMS="+platforms, "DIST="+dist, "PUSH=1", "PLAIN_HTTP=1")

	repository, err := remote.NewRepository(image)
	if err != nil {
		w.t.Fatal(err)
	}
	repository.PlainHTTP = true
	w.wantArchived(filepath.Join(dist, "towline-"+version+".tar"), repository, version)
	for platform := range strings.SplitSeq(platforms, ",") {
		file := w.pullProgram(repository, version, platform)
		if platform == own {
			program = file
		}
	}
	if program == "" {
		w.t.Fatalf("%s=%s lacks %s", platformsVariable, platforms, own)
	}
	if out, err := output(exec.CommandContext(w.t.Context(), program, "version")); err != nil || strings.TrimSpace(out) != version {
		w.t.Fatalf("the program in the image has version %q and error %v, want %s", out, err, version)
	}
	return image, program
}

// wantArchived checks that the archive has the image that was pushed.
func (w *world) wantArchived(archive string, repository *remote.Repository, version string) {
	w.t.Helper()
	store, err := oci.NewFromTar(w.t.Context(), archive)
	if err != nil {
		w.t.Fatal(err)
	}
	archived, errArchived := store.Resolve(w.t.Context(), version)
	pushed, errPushed := repository.Resolve(w.t.Context(), version)
	if err := errors.Join(errArchived, errPushed); err != nil {
		w.t.Fatal(err)
	}
	if archived.Digest != pushed.Digest {
		w.t.Errorf("archived %s, pushed %s", archived.Digest, pushed.Digest)
	}
}

// pullProgram pulls the image for a platform and returns a file with the program in it.
func (w *world) pullProgram(repository *remote.Repository, version, platform string) string {
	w.t.Helper()
	system, architecture, _ := strings.Cut(platform, "/")
	options := oras.FetchBytesOptions{FetchOptions: oras.FetchOptions{ResolveOptions: oras.ResolveOptions{
		TargetPlatform: &ocispec.Platform{OS: system, Architecture: architecture},
	}}}
	_, raw, err := oras.FetchBytes(w.t.Context(), repository, version, options)
	if err != nil {
		w.t.Fatalf("pull for %s: %v", platform, err)
	}
	var manifest ocispec.Manifest
	if err := json.Unmarshal(raw, &manifest); err != nil {
		w.t.Fatal(err)
	}
	layer := w.pullLayer(repository, manifest.Layers[0])
	dir := filepath.Join(w.dir, "image-"+architecture)
	if err := os.Mkdir(dir, 0o700); err != nil {
		w.t.Fatal(err)
	}
	// /manager runs /towline for the commands of the hub.
	for _, name := range []string{"manager", "towline"} {
		if err := extract(layer, name, filepath.Join(dir, name)); err != nil {
			w.t.Fatalf("extract /%s for %s: %v", name, platform, err)
		}
	}
	file := filepath.Join(dir, "manager")
	program, err := elf.Open(file)
	if err != nil {
		w.t.Fatalf("the program for %s: %v", platform, err)
	}
	defer func() { _ = program.Close() }()
	machines := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	if want := machines[architecture]; program.Machine != want {
		w.t.Errorf("the program for %s is for %s, want %s", platform, program.Machine, want)
	}
	return file
}

// pullLayer returns a layer. It may be larger than content.FetchAll allows.
func (w *world) pullLayer(repository *remote.Repository, layer ocispec.Descriptor) []byte {
	w.t.Helper()
	reader, err := repository.Fetch(w.t.Context(), layer)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	verified := content.NewVerifyReader(reader, layer)
	raw, err := io.ReadAll(verified)
	if err := errors.Join(err, verified.Verify()); err != nil {
		w.t.Fatal(err)
	}
	return raw
}

// extract writes a file of a layer to another file, with its mode.
func extract(layer []byte, name, file string) error {
	zipped, err := gzip.NewReader(bytes.NewReader(layer))
	if err != nil {
		return err
	}
	reader := tar.NewReader(zipped)
	for {
		header, err := reader.Next()
		if err != nil {
			return err
		}
		if header.Name != name {
			continue
		}
		content, err := io.ReadAll(reader)
		if err != nil {
			return err
		}
		return os.WriteFile(file, content, header.FileInfo().Mode())
	}
}
