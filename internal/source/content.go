package source

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/phase"
)

// ErrNotFound is wrapped by every error about a missing object or chart that a profile refers to. The error names it.
var ErrNotFound = errors.New("does not exist")

// The kinds of hub objects with content.
const (
	kindConfigMap = string(libv1beta1.SourceConfigMap)
	kindSecret    = string(libv1beta1.SourceSecret)
)

// Reference identifies one ConfigMap, Secret or Flux source on the hub, or one URL.
type Reference struct {
	Kind      string
	Namespace string
	Name      string
	// URL is set for KindURL. Then Namespace and Name name the Secret with the login, or are "".
	URL string
	// InsecureSkipTLSVerify and PlainHTTP are the options of the connection to the URL.
	InsecureSkipTLSVerify, PlainHTTP bool
}

// String returns r for messages, for example "ConfigMap eu/web" or "URL https://example.com/web.yaml".
func (r Reference) String() string {
	if r.Kind == KindURL {
		return r.Kind + " " + redactedRemote(r.URL)
	}
	return r.Kind + " " + r.Namespace + "/" + r.Name
}

// File is one key of a ConfigMap or Secret, or one file of a Flux source or behind a URL.
type File struct {
	// Name is the key, or the clean relative path.
	Name string
	Data []byte
}

// Content is the content of one ConfigMap, Secret or Flux source, or the files behind one URL. It must not be changed.
type Content struct {
	Reference Reference
	// Files are sorted by name. Empty if the optional object does not exist.
	Files []File
	// Digest is "sha256:" and the hex digest of the files' names and bytes.
	Digest string
	// Version changes with Digest and Sensitive of a URL, and with the artifact, Template and Lua of a Flux source. It is
	// "" for a ConfigMap or Secret, and for a missing optional source.
	Version string
	// Sensitive is true if the content is from a Secret, or was fetched with credentials. See WithSensitivityOf for
	// templates.
	Sensitive bool
	// Template is true if the files are Go templates, and Lua if they are scripts in Lua, see TemplateContext.
	Template, Lua bool
	// Subresources are applied after each object in the content.
	Subresources []string
}

// ResolvePolicyRef expands the templates in ref for the template context. The namespace defaults to the cluster's
// namespace. All errors are phase.TerminalError, for example if TemplateContext.RestrictedNamespace does not allow the
// namespace.
func ResolvePolicyRef(ref libv1beta1.PolicyRef, tmplCtx TemplateContext) (Reference, error) {
	if ref.RemoteURL != nil {
		return ResolveRemoteSource(ref.RemoteURL.RemoteSource, tmplCtx)
	}
	return expandReference(Reference{Kind: string(ref.Kind), Namespace: ref.Namespace, Name: ref.Name}, tmplCtx)
}

// ResolveValueFrom is ResolvePolicyRef for an entry of valuesFrom.
func ResolveValueFrom(ref configv1beta1.ValueFrom, tmplCtx TemplateContext) (Reference, error) {
	return expandReference(Reference{Kind: string(ref.Kind), Namespace: ref.Namespace, Name: ref.Name}, tmplCtx)
}

// ResolveSecretRef is ResolvePolicyRef for a Secret with a login or keys.
func ResolveSecretRef(ref corev1.SecretReference, tmplCtx TemplateContext) (Reference, error) {
	return expandReference(Reference{Kind: kindSecret, Namespace: ref.Namespace, Name: ref.Name}, tmplCtx)
}

// Contents reads the content that profiles refer to. It is safe for concurrent use.
type Contents struct {
	// Hub reads ConfigMaps and Secrets of the hub.
	Hub client.Reader
	// Remote fetches the content behind URLs.
	Remote *RemoteFetcher
	// Artifacts reads Flux sources. If it is nil, they are not supported.
	Artifacts *Artifacts
	// Digests caches the digests of ConfigMaps and Secrets, see NewDigests. If it is nil, each read computes the digest.
	Digests *cache.Cache[string]
}

// maxDigests is the maximum number of cached digests.
const maxDigests = 8192

// NewDigests returns an empty cache for Contents.Digests.
func NewDigests() *cache.Cache[string] { return cache.New[string](maxDigests) }

// Manifests reads the content of ref. It fails with ErrNotFound if the object is missing and not optional, and with
// phase.TerminalError for a Secret of the wrong type or an unsupported annotation.
func (c *Contents) Manifests(ctx context.Context, ref libv1beta1.PolicyRef, tmplCtx TemplateContext) (Content, error) {
	reference, err := ResolvePolicyRef(ref, tmplCtx)
	if err != nil {
		return Content{}, err
	}
	if reference.isObject() {
		return c.read(ctx, reference, ref.Optional) // ref.Path is for sources and URLs
	}
	directory, err := tmplCtx.Expand("path of "+reference.String(), ref.Path)
	if err == nil {
		directory, err = cleanDirectory(reference, directory)
	}
	if err != nil {
		return Content{}, err
	}
	if reference.IsFlux() && c.Artifacts != nil {
		return c.Artifacts.manifests(ctx, reference, ref.Optional, directory)
	}
	content, err := c.read(ctx, reference, ref.Optional)
	if err != nil || len(content.Files) == 0 {
		return content, err
	}
	content.Template = ref.RemoteURL.Template
	return selectManifests(content, directory)
}

// Values reads the values in the ConfigMap or Secret of ref. It fails like Manifests.
func (c *Contents) Values(ctx context.Context, ref configv1beta1.ValueFrom, tmplCtx TemplateContext) (Content, error) {
	reference, err := ResolveValueFrom(ref, tmplCtx)
	if err != nil {
		return Content{}, err
	}
	return c.read(ctx, reference, ref.Optional)
}

// expandReference expands the templates in the name and the namespace of ref, see ResolvePolicyRef.
func expandReference(ref Reference, tmplCtx TemplateContext) (Reference, error) {
	var err error
	if ref.Name, err = tmplCtx.Expand("name of a "+ref.Kind, ref.Name); err != nil {
		return Reference{}, err
	}
	if ref.Namespace, err = tmplCtx.Expand("namespace of "+ref.Kind+" "+ref.Name, ref.Namespace); err != nil {
		return Reference{}, err
	}
	ref.Namespace = cmp.Or(ref.Namespace, tmplCtx.Namespace)
	if ref.Name == "" {
		return Reference{}, phase.TerminalErrorf("a reference to a %s has no name", ref.Kind)
	}
	if tmplCtx.RestrictedNamespace != "" && ref.Namespace != tmplCtx.RestrictedNamespace {
		return Reference{}, phase.TerminalErrorf("%s: a Profile reads its own namespace %s only", ref, tmplCtx.RestrictedNamespace)
	}
	return ref, nil
}

// read returns all files of ref. There are none if it is optional and does not exist.
func (c *Contents) read(ctx context.Context, ref Reference, isOptional bool) (Content, error) {
	if ref.Kind == KindURL {
		return c.readRemote(ctx, ref, isOptional)
	}
	if ref.IsFlux() && c.Artifacts != nil {
		return c.Artifacts.read(ctx, ref, isOptional)
	}
	meta, data, err := readData(ctx, c.Hub, ref)
	if apierrors.IsNotFound(err) {
		if isOptional {
			return newContent(ref, nil), nil
		}
		return Content{}, fmt.Errorf("%s %w", ref, ErrNotFound)
	}
	if err != nil {
		return Content{}, fmt.Errorf("read %s: %w", ref, err)
	}
	content := newContentWithoutDigest(ref, data)
	content.Digest = c.filesDigest(meta, content.Files)
	err = content.readAnnotations(meta.Annotations)
	return content, err
}

// filesDigest returns Content.Digest for the files of object. It computes the digest once per version of the object,
// and not for each cluster.
func (c *Contents) filesDigest(object metav1.ObjectMeta, files []File) string {
	if c.Digests == nil || object.UID == "" || object.ResourceVersion == "" {
		return digestOfFiles(files)
	}
	key := string(object.UID) + "/" + object.ResourceVersion
	if digest, ok := c.Digests.Get(key); ok {
		return digest
	}
	return c.Digests.GetOrPut(key, digestOfFiles(files), 1)
}

// readAnnotations sets Template, Lua and Subresources by the annotations of the object. All errors are
// phase.TerminalError.
func (c *Content) readAnnotations(annotations map[string]string) (err error) {
	if c.Subresources, err = subresourcesOf(c.Reference, annotations); err != nil {
		return err
	}
	_, c.Template = annotations[libv1beta1.TemplateAnnotation]
	_, c.Lua = annotations[libv1beta1.LuaAnnotation]
	if c.Template && c.Lua {
		return phase.TerminalErrorf("%s: it cannot have both annotations %s and %s", c.Reference, libv1beta1.TemplateAnnotation, libv1beta1.LuaAnnotation)
	}
	return nil
}

// isManifest returns whether a file has the extension of manifests and is not a kustomization.yaml.
func isManifest(name string) bool {
	switch path.Base(name) {
	case "kustomization.yaml", "kustomization.yml", "Kustomization":
		return false
	}
	return hasManifestExtension(name)
}

func hasManifestExtension(name string) bool {
	return slices.Contains([]string{".yaml", ".yml", ".json"}, path.Ext(name))
}

// readData returns the data of a ConfigMap or Secret. Its error wraps the error of hub.
func readData(ctx context.Context, hub client.Reader, ref Reference) (metav1.ObjectMeta, map[string][]byte, error) {
	key := client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}
	switch ref.Kind {
	case kindConfigMap:
		var found corev1.ConfigMap
		if err := hub.Get(ctx, key, &found); err != nil {
			return metav1.ObjectMeta{}, nil, err
		}
		data := maps.Clone(found.BinaryData)
		if data == nil {
			data = map[string][]byte{}
		}
		for name, text := range found.Data {
			data[name] = []byte(text)
		}
		return found.ObjectMeta, data, nil
	case kindSecret:
		var found corev1.Secret
		if err := hub.Get(ctx, key, &found); err != nil {
			return metav1.ObjectMeta{}, nil, err
		}
		if found.Type != libv1beta1.ProfileSecretType {
			return metav1.ObjectMeta{}, nil, phase.TerminalErrorf("its type is %q, but only Secrets of type %q can be deployed", found.Type, libv1beta1.ProfileSecretType)
		}
		return found.ObjectMeta, found.Data, nil
	}
	return metav1.ObjectMeta{}, nil, phase.TerminalErrorf("kind %q is not supported yet", ref.Kind)
}

func newContent(ref Reference, data map[string][]byte) Content {
	content := newContentWithoutDigest(ref, data)
	content.Digest = digestOfFiles(content.Files)
	return content
}

func newContentWithoutDigest(ref Reference, data map[string][]byte) Content {
	content := Content{Reference: ref, Sensitive: ref.Kind == kindSecret}
	for _, name := range slices.Sorted(maps.Keys(data)) {
		content.Files = append(content.Files, File{Name: name, Data: data[name]})
	}
	return content
}

func digestOfFiles(files []File) string {
	sum := sha256.New()
	for _, file := range files {
		for _, part := range [][]byte{[]byte(file.Name), file.Data} {
			// With the lengths, two lists of different parts never have the same digest.
			sum.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
			sum.Write(part)
		}
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil))
}
