package render

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

const (
	// buildFunction is the name of the function in the sandbox that builds a kustomization. buildLimit is its time limit:
	// kustomize takes about 7 s for 1,000 Deployments.
	buildFunction = "kustomize"
	buildLimit    = time.Minute
	// maxBuiltCache and maxSubstitutedCache limit the two caches of a KustomizationRenderer, in bytes of memory.
	maxBuiltCache       = 32 << 20
	maxSubstitutedCache = 16 << 20
)

// Kustomization has the inputs of one build.
type Kustomization struct {
	Content source.Content
	// Path is the directory with the kustomization, "" for the root of the content.
	Path string
	// Components are directories of components, relative to Path. They are added to the kustomization.
	Components []string
	// Namespace replaces the namespace of all objects, unless it is empty.
	Namespace string
	// Values are the data for the templates in the built objects. Without values, the objects are not expanded.
	Values map[string]string
	// HasPrivateValues is true if values can contain text of a Secret.
	HasPrivateValues bool
}

// NewKustomization expands the templates in the fields and in the values of ref. from has the contents of valuesFrom:
// they override ref.Values, and later contents override earlier ones. Errors are phase.TerminalError and name the
// content and the field.
func NewKustomization(content source.Content, ref configv1beta1.KustomizationRef, from []source.Content, tmplCtx source.TemplateContext) (Kustomization, error) {
	k := Kustomization{
		Content: content, Namespace: ref.TargetNamespace, Values: make(map[string]string, len(ref.Values)), HasPrivateValues: tmplCtx.Resources.HasSecret,
	}
	var err error
	if k.Path, err = tmplCtx.Expand(fmt.Sprintf("%s, path", content.Reference), ref.Path); err != nil {
		return Kustomization{}, err
	}
	for _, component := range ref.Components {
		expanded, err := tmplCtx.Expand(fmt.Sprintf("%s, component %s", content.Reference, component), component)
		if err != nil {
			return Kustomization{}, err
		}
		k.Components = append(k.Components, expanded)
	}
	for _, key := range slices.Sorted(maps.Keys(ref.Values)) {
		if k.Values[key], err = tmplCtx.Expand(fmt.Sprintf("%s, value %s", content.Reference, key), ref.Values[key]); err != nil {
			return Kustomization{}, err
		}
	}
	for _, values := range from {
		texts, _, err := expandFiles(values, tmplCtx)
		if err != nil {
			return Kustomization{}, err
		}
		k.HasPrivateValues = k.HasPrivateValues || values.Sensitive
		for i, text := range texts {
			k.Values[values.Files[i].Name] = string(text)
		}
	}
	return k, nil
}

// String describes k in messages, for example "ConfigMap eu/web, path overlay".
func (k Kustomization) String() string {
	if k.Path == "" {
		return k.Content.Reference.String()
	}
	return fmt.Sprintf("%s, path %s", k.Content.Reference, k.Path)
}

// KustomizationRenderer builds kustomizations in a sandbox, each one once for all members. It is safe for concurrent
// use.
type KustomizationRenderer struct {
	sandbox *sandbox.Pool
	// built has the results of builds, substituted the results after their templates were expanded with values.
	built, substituted *cache.Cache[builtKustomization]
}

// builtKustomization is the result of a build. It must not be changed.
type builtKustomization struct {
	objects   []*unstructured.Unstructured
	documents *kube.Documents
	// templates has the texts of the objects that contain "{{", by their index in objects.
	templates map[int]string
	// err is the error of a build that would fail again in the same way. There are no objects then.
	err error
}

// NewKustomizationRenderer returns a KustomizationRenderer with empty caches. Without a pool, Render fails.
func NewKustomizationRenderer(pool *sandbox.Pool) *KustomizationRenderer {
	return &KustomizationRenderer{
		sandbox: pool, built: cache.New[builtKustomization](maxBuiltCache), substituted: cache.New[builtKustomization](maxSubstitutedCache),
	}
}

// Render builds k, and returns its objects with their documents. Neither must be changed. Errors that only a change of
// the content or of the profile can correct are phase.TerminalError. All errors name the content and the path.
func (r *KustomizationRenderer) Render(k Kustomization, tmplCtx source.TemplateContext) ([]*unstructured.Unstructured, *kube.Documents, error) {
	var err error
	if k.Path, err = cleanDirectory(k.Path); err != nil {
		return nil, nil, phase.TerminalErrorf("%s: path: %w", k.Content.Reference, err)
	}
	inputs, err := json.Marshal([]any{tmplCtx.RestrictedNamespace, k.Content.Reference, k.Content.Digest, k.Content.Sensitive, k.Path, k.Components, k.Namespace})
	if err != nil {
		return nil, nil, phase.TerminalErrorf("%s: %w", k, err)
	}
	key := string(inputs)
	built, err := r.built.GetOrCompute(key, func() (builtKustomization, int, error) {
		built, size, err := r.build(k, key, tmplCtx)
		if _, isInvalid := errors.AsType[phase.TerminalError](err); isInvalid {
			return builtKustomization{err: err}, cache.MinSize + len(err.Error()), nil
		}
		return built, size, err
	})
	if err == nil {
		err = built.err
	}
	if err == nil && len(k.Values) > 0 && len(built.templates) > 0 {
		built, err = r.substituted.GetOrCompute(fmt.Sprintf("%s %x", key, hashValues(k.Values)), func() (builtKustomization, int, error) {
			return built.substitute(k, tmplCtx)
		})
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", k, err)
	}
	return built.objects, built.documents, nil
}

// cleanDirectory returns the clean relative path of a directory, "" for the root.
func cleanDirectory(name string) (string, error) {
	if relative := path.Clean(strings.TrimPrefix(name, "/")); name == "" || relative == "." || relative == "/" {
		return "", nil
	}
	return archive.CleanPath(strings.TrimPrefix(name, "/"))
}

func hashValues(values map[string]string) []byte {
	hash := sha256.New()
	for _, key := range slices.Sorted(maps.Keys(values)) {
		_, _ = fmt.Fprintf(hash, "%q %q\n", key, values[key]) // a hash returns no error
	}
	return hash.Sum(nil)
}

// build builds k in the sandbox, and also returns the size of the result.
func (r *KustomizationRenderer) build(k Kustomization, key string, tmplCtx source.TemplateContext) (builtKustomization, int, error) {
	if r.sandbox == nil {
		return builtKustomization{}, 0, errors.New("there is no sandbox to build it in")
	}
	input := kustomizationInput{Path: k.Path, Components: k.Components, Namespace: k.Namespace}
	files := map[string][]byte{}
	if file, ok := k.Content.Archive(); ok {
		input.ArchiveName, input.Archive = file.Name, file.Data
	} else {
		for _, file := range k.Content.Files {
			input.Names = append(input.Names, file.Name)
			files[file.Name] = file.Data
		}
	}
	var output kustomizationOutput
	err := r.sandbox.Call(sandbox.Call{
		Function: buildFunction, Scope: tmplCtx.RestrictedNamespace, Key: buildFunction + " " + key, Limit: buildLimit, Input: input, Output: &output, Memory: tmplCtx.Memory,
		Callback: func(input json.RawMessage) (any, error) {
			var name string
			if err := json.Unmarshal(input, &name); err != nil {
				return nil, err
			}
			return files[name], nil
		},
	})
	if _, isInvalid := errors.AsType[phase.TerminalError](err); isInvalid && k.Content.Sensitive {
		// Messages of kustomize can contain whole files.
		err = phase.TerminalErrorf("kustomize failed (details are not shown, because the source is a Secret or needs one)")
	}
	if err != nil {
		return builtKustomization{}, 0, err
	}
	return output.decode(tmplCtx.Memory)
}

// decode decodes the result of a build, reserves memory for it, and also returns its size.
func (o kustomizationOutput) decode(reserved *kube.ContentReservation) (builtKustomization, int, error) {
	objects, documents, err := decodeObjects(o.Objects, reserved)
	if err != nil {
		return builtKustomization{}, 0, err
	}
	built := builtKustomization{objects: objects, documents: documents, templates: o.Templates}
	size := cache.MinSize + int(documents.Memory())
	for i, text := range o.Templates {
		if i < 0 || i >= len(objects) {
			return builtKustomization{}, 0, fmt.Errorf("the sandbox returned a template with index %d of %d objects", i, len(objects))
		}
		size += len(text)
	}
	return built, size, nil
}

// substitute expands the objects that are templates, and also returns the size of the result.
func (b builtKustomization) substitute(k Kustomization, tmplCtx source.TemplateContext) (builtKustomization, int, error) {
	indices := slices.Sorted(maps.Keys(b.templates))
	texts := make([]source.Text, 0, len(indices))
	for _, i := range indices {
		texts = append(texts, source.Text{Description: kube.RefOf(b.objects[i]).String(), Text: b.templates[i]})
	}
	expanded, err := tmplCtx.Substitute(texts, k.Values)
	if err != nil && k.Content.Sensitive {
		err = source.HideDetails("the built objects, which are templates with values", err)
	}
	if err != nil {
		return builtKustomization{}, 0, err
	}
	substituted, added := builtKustomization{objects: slices.Clone(b.objects)}, int64(0)
	for n, i := range indices {
		decoded, memory, err := kube.DecodeManifestReserving(tmplCtx.Memory, []byte(expanded[n]))
		added += memory
		if err == nil && len(decoded) != 1 {
			err = fmt.Errorf("it became %d objects", len(decoded))
		}
		if err != nil {
			tmplCtx.Memory.Subtract(added)
		}
		if kube.IsMemoryError(err) {
			return builtKustomization{}, 0, err
		}
		if err != nil {
			origin := texts[n].Description + " with its values"
			err = phase.TerminalErrorf("%s: %w", origin, err)
			if k.HasPrivateValues || k.Content.Sensitive {
				err = source.HideDetails(origin, err)
			}
			return builtKustomization{}, 0, err
		}
		substituted.objects[i] = decoded[0]
	}
	substituted.documents = kube.NewDocuments(substituted.objects)
	if err := tmplCtx.Memory.MoveToDocuments(substituted.documents, added); err != nil {
		return builtKustomization{}, 0, err
	}
	return substituted, cache.MinSize + int(substituted.documents.Memory()), nil
}
