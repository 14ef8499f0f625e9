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

// user runs the program. Pod security standards want a number.
const user = "65532:65532"

// containerdName is the annotation that gives an image in an archive its whole name.
const containerdName = "io.containerd.image.name"

// epoch is the one time in an image: it must not depend on when it was built.
func epoch() time.Time { return time.Unix(0, 0).UTC() }

// build builds the image and writes it to the archive and the registry of the options.
func (o options) build(ctx context.Context, compile compiler) error {
	name, tag, err := splitReference(o.reference)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "towline-image-")
	if err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(work) }()
	layout := filepath.Join(work, "layout")
	store, err := oci.NewWithContext(ctx, layout)
	if err != nil {
		return fmt.Errorf("make an OCI layout: %w", err)
	}
	// Its index would list the manifests of the platforms, too, in any order.
	store.AutoSaveIndex = false
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	for _, platform := range o.platforms {
		program := filepath.Join(work, "manager")
		if err := compile(ctx, platform, program); err != nil {
			return fmt.Errorf("compile for %s: %w", platform, err)
		}
		manifest, err := o.addPlatform(ctx, store, platform, program)
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
	root.Annotations = map[string]string{ocispec.AnnotationRefName: tag, containerdName: qualified(name) + ":" + tag}
	if err := writeIndex(layout, root); err != nil {
		return fmt.Errorf("write the index of the layout: %w", err)
	}
	if o.archive != "" {
		if err := writeArchive(o.archive, layout); err != nil {
			return fmt.Errorf("write %s: %w", o.archive, err)
		}
	}
	if o.push {
		return o.pushTo(ctx, store, name, tag)
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
	if _, err := registry.ParseReference(qualified(name) + ":" + tag); err != nil {
		return "", "", fmt.Errorf("image %q: %w", reference, err)
	}
	return name, tag, nil
}

// qualified adds the registry that container engines add to names without one.
func qualified(name string) string {
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

// addPlatform adds the image of one platform to the store.
func (o options) addPlatform(ctx context.Context, store oras.Target, platform, program string) (ocispec.Descriptor, error) {
	system, architecture, _ := strings.Cut(platform, "/")
	where := ocispec.Platform{OS: system, Architecture: architecture}
	files, err := o.files(program)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	layer, diffID, err := compressed(files)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	layers, err := oras.PushBytes(ctx, store, ocispec.MediaTypeImageLayerGzip, layer)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	created := epoch()
	config, err := pushJSON(ctx, store, ocispec.MediaTypeImageConfig, ocispec.Image{
		Created: &created, Platform: where,
		Config: ocispec.ImageConfig{User: user, Entrypoint: []string{"/manager"}, Env: []string{"PATH=/bin"}, WorkingDir: "/"},
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{diffID}},
	})
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	manifest, err := pushJSON(ctx, store, ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Config: config, Layers: []ocispec.Descriptor{layers},
	})
	manifest.Platform = &where
	return manifest, err
}

// files returns the file system of the image as a tar.
func (o options) files(program string) ([]byte, error) {
	var archive bytes.Buffer
	tarred := tar.NewWriter(&archive)
	if err := addFile(tarred, "manager", program, 0o755); err != nil {
		return nil, err
	}
	// Manifests of Karmada start the agent by this name.
	link := tar.Header{Name: "bin/karmada-agent", Linkname: "/manager", Typeflag: tar.TypeSymlink, Mode: 0o777, ModTime: epoch()}
	if err := tarred.WriteHeader(&link); err != nil {
		return nil, err
	}
	for _, file := range o.licenses {
		if err := addFile(tarred, "licenses/"+filepath.Base(file), file, 0o644); err != nil {
			return nil, fmt.Errorf("add a license: %w", err)
		}
	}
	if o.certificates != "" {
		if err := addFile(tarred, "etc/ssl/certs/ca-certificates.crt", o.certificates, 0o644); err != nil {
			return nil, fmt.Errorf("add the certificate authorities; name another file with --certificates: %w", err)
		}
	}
	if err := tarred.Close(); err != nil {
		return nil, err
	}
	return archive.Bytes(), nil
}

func addFile(tarred *tar.Writer, name, file string, mode int64) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := tarred.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(content)), ModTime: epoch()}); err != nil {
		return err
	}
	_, err = tarred.Write(content)
	return err
}

// compressed returns the compressed content, and the digest of the content itself.
func compressed(content []byte) ([]byte, digest.Digest, error) {
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

// writeIndex makes an image the only one of an OCI layout.
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

// pushTo copies the image to its registry.
func (o options) pushTo(ctx context.Context, store oras.ReadOnlyTarget, name, tag string) error {
	repository, err := remote.NewRepository(qualified(name))
	if err != nil {
		return fmt.Errorf("open %s: %w", name, err)
	}
	logins, err := credentials.NewStoreFromDocker(credentials.StoreOptions{})
	if err != nil {
		return fmt.Errorf("read the logins of registries: %w", err)
	}
	repository.PlainHTTP = o.plainHTTP
	repository.Client = &auth.Client{Cache: auth.NewCache(), Credential: credentials.Credential(logins)}
	if _, err := oras.Copy(ctx, store, tag, repository, tag, oras.DefaultCopyOptions); err != nil {
		return fmt.Errorf("push %s:%s: %w", name, tag, err)
	}
	return nil
}
