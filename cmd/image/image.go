package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content/oci"
	"oras.land/oras-go/v2/registry"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
	"oras.land/oras-go/v2/registry/remote/credentials"
)

// user is the user of the container. runAsNonRoot needs a numeric user.
const user = "65532:65532"

// containerdName is the annotation with the full name of an image in an archive, which containerd reads.
const containerdName = "io.containerd.image.name"

// program is a program in the image: a directory of cmd, and its file in the root directory of the image.
type program struct{ command, file string }

// programs returns the programs in the image. All manifests call /manager. It is the program of the agents, and runs
// /towline for all other commands.
func programs() []program { return []program{{"towline-agent", "manager"}, {"towline", "towline"}} }

// epoch is the value of all timestamps in the image. The image must not depend on the time of the build.
func epoch() time.Time { return time.Unix(0, 0).UTC() }

// build builds the image for each platform, and writes it to the archive and the registry in the options.
func (o options) build(ctx context.Context, compile compiler) error {
	name, tag, err := splitReference(o.reference)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "towline-image-")
	if err != nil {
		return fmt.Errorf("create a directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(work) }()
	layout := filepath.Join(work, "layout")
	store, err := oci.NewWithContext(ctx, layout)
	if err != nil {
		return fmt.Errorf("create an OCI layout: %w", err)
	}
	// The index that the store writes also lists the manifest of each platform, in random order. writeIndex replaces it.
	store.AutoSaveIndex = false
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	for _, platform := range o.platforms {
		for _, program := range programs() {
			if err := compile(ctx, platform, program.command, filepath.Join(work, program.file)); err != nil {
				return fmt.Errorf("compile %s for %s: %w", program.command, platform, err)
			}
		}
		manifest, err := o.addPlatform(ctx, store, platform, work)
		if err != nil {
			return fmt.Errorf("build the image for %s: %w", platform, err)
		}
		index.Manifests = append(index.Manifests, manifest)
	}
	root, err := pushJSON(ctx, store, ocispec.MediaTypeImageIndex, index)
	if err != nil {
		return fmt.Errorf("write the index: %w", err)
	}
	if err := store.Tag(ctx, root, tag); err != nil {
		return fmt.Errorf("tag the image: %w", err)
	}
	root.Annotations = map[string]string{ocispec.AnnotationRefName: tag, containerdName: qualifiedName(name) + ":" + tag}
	if err := writeIndex(layout, root); err != nil {
		return fmt.Errorf("write the index of the layout: %w", err)
	}
	if o.archive != "" {
		if err := writeArchive(o.archive, layout); err != nil {
			return fmt.Errorf("write %s: %w", o.archive, err)
		}
	}
	if o.push {
		return o.pushImage(ctx, store, name, tag)
	}
	return nil
}

// splitReference splits <repository>:<tag>.
func splitReference(reference string) (name, tag string, err error) {
	at := strings.LastIndex(reference, ":")
	if at < 0 || at == len(reference)-1 || strings.Contains(reference[at:], "/") {
		return "", "", fmt.Errorf("image %q has no tag", reference)
	}
	name, tag = reference[:at], reference[at+1:]
	if _, err := registry.ParseReference(qualifiedName(name) + ":" + tag); err != nil {
		return "", "", fmt.Errorf("image %q: %w", reference, err)
	}
	return name, tag, nil
}

// qualifiedName adds the default registry, as container engines do, to a name without a registry.
func qualifiedName(name string) string {
	host, _, found := strings.Cut(name, "/")
	switch {
	case !found:
		return "docker.io/library/" + name
	case !strings.ContainsAny(host, ".:") && host != "localhost":
		return "docker.io/" + name
	default:
		return name
	}
}

// addPlatform adds the image of one platform, with the programs in dir, to the store.
func (o options) addPlatform(ctx context.Context, store oras.Target, platform, dir string) (ocispec.Descriptor, error) {
	system, architecture, _ := strings.Cut(platform, "/")
	target := ocispec.Platform{OS: system, Architecture: architecture}
	files, err := o.layerArchive(dir)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	layer, diffID, err := compress(files)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	layerDescriptor, err := oras.PushBytes(ctx, store, ocispec.MediaTypeImageLayerGzip, layer)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	created := epoch()
	config, err := pushJSON(ctx, store, ocispec.MediaTypeImageConfig, ocispec.Image{
		Created: &created, Platform: target,
		Config: ocispec.ImageConfig{User: user, Entrypoint: []string{"/manager"}, Env: []string{"PATH=/bin"}, WorkingDir: "/"},
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diffID}},
	})
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	manifest, err := pushJSON(ctx, store, ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: config, Layers: []ocispec.Descriptor{layerDescriptor},
	})
	manifest.Platform = &target
	return manifest, err
}

// layerArchive returns the file system of the image, with the programs in dir, as a tar archive.
func (o options) layerArchive(dir string) ([]byte, error) {
	var archive bytes.Buffer
	writer := tar.NewWriter(&archive)
	for _, program := range programs() {
		if err := addFile(writer, program.file, filepath.Join(dir, program.file), 0o755); err != nil {
			return nil, err
		}
	}
	// Manifests of Karmada start the agent by this name.
	link := tar.Header{Name: "bin/karmada-agent", Linkname: "/manager", Typeflag: tar.TypeSymlink, Mode: 0o777, ModTime: epoch()}
	if err := writer.WriteHeader(&link); err != nil {
		return nil, err
	}
	for _, file := range o.licenses {
		if err := addFile(writer, "licenses/"+filepath.Base(file), file, 0o644); err != nil {
			return nil, fmt.Errorf("add a license: %w", err)
		}
	}
	if o.certificates != "" {
		if err := addFile(writer, "etc/ssl/certs/ca-certificates.crt", o.certificates, 0o644); err != nil {
			return nil, fmt.Errorf("add the certificate authorities; name another file with --certificates: %w", err)
		}
	}
	if err := writer.Close(); err != nil {
		return nil, err
	}
	return archive.Bytes(), nil
}

func addFile(writer *tar.Writer, name, file string, mode int64) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	header := tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(content)), ModTime: epoch()}
	if err := writer.WriteHeader(&header); err != nil {
		return err
	}
	_, err = writer.Write(content)
	return err
}

// compress returns the compressed content, and the digest of the uncompressed content.
func compress(content []byte) ([]byte, digest.Digest, error) {
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	if _, err := zipped.Write(content); err != nil {
		return nil, "", err
	}
	if err := zipped.Close(); err != nil {
		return nil, "", err
	}
	return out.Bytes(), digest.FromBytes(content), nil
}

func pushJSON(ctx context.Context, store oras.Target, mediaType string, value any) (ocispec.Descriptor, error) {
	content, err := json.Marshal(value)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	return oras.PushBytes(ctx, store, mediaType, content)
}

// writeIndex writes the index of an OCI layout, with one image.
func writeIndex(layout string, root ocispec.Descriptor) error {
	index := ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{root},
	}
	content, err := json.Marshal(index)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(layout, ocispec.ImageIndexFile), content, 0o600)
}

// pushImage copies the image to its registry.
func (o options) pushImage(ctx context.Context, store oras.ReadOnlyTarget, name, tag string) error {
	repository, err := remote.NewRepository(qualifiedName(name))
	if err != nil {
		return fmt.Errorf("open %s: %w", name, err)
	}
	credentialStore, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
	if err != nil {
		return fmt.Errorf("read the credentials for registries: %w", err)
	}
	repository.PlainHTTP = o.plainHTTP
	repository.Client = &auth.Client{Cache: auth.NewCache(), Credential: credentials.Credential(credentialStore)}
	if _, err := oras.Copy(ctx, store, tag, repository, tag, oras.DefaultCopyOptions); err != nil {
		return fmt.Errorf("push %s:%s: %w", name, tag, err)
	}
	return nil
}
