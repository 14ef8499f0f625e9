package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"

	jsonpatch "github.com/evanphx/json-patch/v5"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// ErrPatch is returned if the patches for an agent's manifest are invalid, or if their ConfigMap does not exist. The
// error names the ConfigMap, the key of an invalid patch, and the reason.
var ErrPatch = errors.New("patches of the agent's manifest")

// patchesAnnotation on namespace kube.AgentNamespace of the hub is the <namespace>/<name> of the default patch
// ConfigMap, see SetDefaultPatches.
const patchesAnnotation = "towline.dev/agent-patch-config-map"

// defaultPatchesSource is the name of the reference to the default patch ConfigMap in errors.
const defaultPatchesSource = "--agent-patch-config-map of the hub"

// SetDefaultPatches sets the annotation for the default patch ConfigMap, <namespace>/<name>; "" removes it. The patches
// are for pull-mode clusters without the annotation libv1beta1.AgentConfigAnnotation. The hub and sveltosctl read the
// annotation for each manifest. The ConfigMap may be created later.
func SetDefaultPatches(ctx context.Context, hub client.Client, configMap string) error {
	if configMap != "" {
		if _, err := ParsePatchesReference(configMap); err != nil {
			return err
		}
	}
	namespace := &corev1.Namespace{}
	if err := hub.Get(ctx, client.ObjectKey{Name: kube.AgentNamespace}, namespace); err != nil {
		return fmt.Errorf("read namespace %s: %w", kube.AgentNamespace, err)
	}
	if namespace.Annotations[patchesAnnotation] == configMap {
		return nil
	}
	before := namespace.DeepCopy()
	if metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, patchesAnnotation, configMap); configMap == "" {
		delete(namespace.Annotations, patchesAnnotation)
	}
	if err := hub.Patch(ctx, namespace, client.MergeFrom(before), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("write the agents' patches onto namespace %s: %w", kube.AgentNamespace, err)
	}
	return nil
}

// ParsePatchesReference parses <namespace>/<name> of a ConfigMap, and validates both.
func ParsePatchesReference(text string) (client.ObjectKey, error) {
	namespace, name, _ := strings.Cut(text, "/")
	if len(validation.IsDNS1123Label(namespace)) > 0 || len(validation.IsDNS1123Subdomain(name)) > 0 {
		return client.ObjectKey{}, fmt.Errorf("%q is not <namespace>/<name> of a ConfigMap", text)
	}
	return client.ObjectKey{Namespace: namespace, Name: name}, nil
}

// patchesFor returns the patches for a cluster's manifest in the order of their keys, or nil without a patch ConfigMap.
// It reads the metadata of kube.AgentNamespace from cache, and the ConfigMap from hub.
func patchesFor(ctx context.Context, hub, cache client.Reader, cluster *libv1beta1.SveltosCluster) ([]patch, error) {
	reference := cluster.Annotations[libv1beta1.AgentConfigAnnotation]
	referenceSource := "annotation " + libv1beta1.AgentConfigAnnotation
	if reference == "" {
		namespace := newPartialMetadata("Namespace")
		if err := cache.Get(ctx, client.ObjectKey{Name: kube.AgentNamespace}, namespace); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read namespace %s: %w", kube.AgentNamespace, err)
		}
		reference, referenceSource = namespace.Annotations[patchesAnnotation], defaultPatchesSource
	}
	if reference == "" {
		return nil, nil
	}
	key, err := ParsePatchesReference(reference)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrPatch, referenceSource, err)
	}
	configMap := &corev1.ConfigMap{}
	err = hub.Get(ctx, key, configMap)
	if isForeign := referenceSource != defaultPatchesSource && key.Namespace != cluster.Namespace && key.Namespace != kube.AgentNamespace; isForeign {
		// A user who may annotate clusters in one namespace must neither read nor detect the ConfigMaps of other namespaces.
		if client.IgnoreNotFound(err) == nil && configMap.Labels[kube.LabelAgentPatches] != "true" {
			return nil, fmt.Errorf("%w: ConfigMap %s, which %s names, does not exist or does not have the label %s: \"true\", which clusters in other namespaces need",
				ErrPatch, key, referenceSource, kube.LabelAgentPatches)
		}
	}
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("%w: ConfigMap %s, which %s names, does not exist", ErrPatch, key, referenceSource)
	} else if err != nil {
		return nil, fmt.Errorf("read ConfigMap %s: %w", key, err)
	}
	var patches []patch
	for _, name := range slices.Sorted(maps.Keys(configMap.Data)) {
		origin := fmt.Sprintf("ConfigMap %s, key %s", key, name)
		parsed, err := parsePatch(origin, configMap.Data[name])
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrPatch, origin, err)
		}
		patches = append(patches, parsed)
	}
	return patches, nil
}

// maxCopied limits the total size, in bytes, of the values that one JSON 6902 patch copies.
const maxCopied = 1 << 20

// patch is one patch of an agent's manifest.
type patch struct {
	// origin names the ConfigMap and the key of the patch in errors.
	origin string
	// target selects the objects to patch. An empty field selects all.
	target libv1beta1.PatchSelector
	// merge is a strategic merge patch in JSON, operations is a JSON 6902 patch. One of them is nil.
	merge      []byte
	operations jsonpatch.Patch
}

// parsePatch parses {patch, target}, or a patch alone. Without a target, a strategic merge patch that has a kind
// selects the object with its kind, namespace and name; any other patch selects the Deployment.
func parsePatch(origin, text string) (patch, error) {
	p := patch{origin: origin}
	given := libv1beta1.Patch{Patch: text}
	var content any
	if err := decodeDocument(text, &content); err != nil {
		return p, err
	}
	if fields, _ := content.(map[string]any); fields["patch"] != nil {
		if err := yaml.UnmarshalStrict([]byte(text), &given); err != nil { // decodeDocument has checked the size
			return p, fmt.Errorf("it is not {patch, target}: %s", kube.OneLine(err.Error()))
		}
		content = nil
		if err := decodeDocument(given.Patch, &content); err != nil {
			return p, fmt.Errorf("field patch: %w", err)
		}
	}
	p.target = libv1beta1.PatchSelector{Group: "apps", Kind: "Deployment"}
	if fields, ok := content.(map[string]any); ok {
		if object := (&unstructured.Unstructured{Object: fields}); object.GetKind() != "" {
			p.target = selectorOf(object)
		}
		if given.Target != nil {
			// The target selects the objects, and the patch must not change their kind or name.
			for _, path := range [][]string{{"apiVersion"}, {"kind"}, {"metadata", "name"}, {"metadata", "namespace"}} {
				unstructured.RemoveNestedField(fields, path...)
			}
		}
	}
	if given.Target != nil {
		p.target = *given.Target
	}
	raw, err := json.Marshal(content)
	if err != nil {
		return p, fmt.Errorf("encode it: %w", err)
	}
	switch content.(type) {
	case map[string]any:
		p.merge = raw
	case []any:
		p.operations, err = jsonpatch.DecodePatch(raw)
	default:
		err = errors.New("it is neither a strategic merge patch, nor a list of JSON 6902 operations, nor {patch, target}")
	}
	return p, err
}

// decodeDocument decodes text, which must be one YAML document within the limits of kube.CheckValueCount.
func decodeDocument(text string, into *any) error {
	if err := kube.CheckValueCount([]byte(text)); err != nil {
		return err
	}
	decoder := utilyaml.NewYAMLToJSONDecoder(strings.NewReader(text))
	if err := decoder.Decode(into); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("it is not YAML: %s", kube.OneLine(err.Error()))
	}
	if err := decoder.Decode(new(any)); !errors.Is(err, io.EOF) {
		return errors.New("it holds more than one document")
	}
	return nil
}

// selectorOf returns a selector for objects with the kind, namespace and name of object.
func selectorOf(object *unstructured.Unstructured) libv1beta1.PatchSelector {
	gvk := object.GroupVersionKind()
	return libv1beta1.PatchSelector{
		Group: regexp.QuoteMeta(gvk.Group), Version: regexp.QuoteMeta(gvk.Version), Kind: regexp.QuoteMeta(gvk.Kind),
		Namespace: regexp.QuoteMeta(object.GetNamespace()), Name: regexp.QuoteMeta(object.GetName()),
	}
}

// selects returns whether the target selects obj. It returns an error if the target is invalid.
func (p patch) selects(obj *unstructured.Unstructured) (bool, error) {
	gvk, t := obj.GroupVersionKind(), p.target
	for expression, value := range map[[2]string]string{
		{"group", t.Group}: gvk.Group, {"version", t.Version}: gvk.Version, {"kind", t.Kind}: gvk.Kind,
		{"namespace", t.Namespace}: obj.GetNamespace(), {"name", t.Name}: obj.GetName(),
	} {
		pattern, err := kube.CompilePattern(expression[1])
		if err != nil {
			return false, fmt.Errorf("target.%s: %w", expression[0], err)
		}
		if expression[1] != "" && !pattern.MatchString(value) {
			return false, nil
		}
	}
	byLabels, err := labels.Parse(t.LabelSelector)
	if err != nil {
		return false, fmt.Errorf("target.labelSelector: %w", err)
	}
	byAnnotations, err := labels.Parse(t.AnnotationSelector)
	if err != nil {
		return false, fmt.Errorf("target.annotationSelector: %w", err)
	}
	return byLabels.Matches(labels.Set(obj.GetLabels())) && byAnnotations.Matches(labels.Set(obj.GetAnnotations())), nil
}

// applyTo replaces the selected objects by patched copies. It returns ErrPatch if it selects no object or fails.
func (p patch) applyTo(objects []*unstructured.Unstructured) error {
	isUsed := false
	for i, obj := range objects {
		isSelected, err := p.selects(obj)
		if err == nil && isSelected {
			isUsed = true
			if objects[i], err = p.apply(obj); err != nil {
				err = fmt.Errorf("%s: %w", kube.RefOf(obj), err)
			}
		}
		if err != nil {
			return fmt.Errorf("%w: %s: %s", ErrPatch, p.origin, kube.OneLine(err.Error()))
		}
	}
	if !isUsed {
		return fmt.Errorf("%w: %s: it hits nothing in the manifest", ErrPatch, p.origin)
	}
	return nil
}

// mergeStrategically is StrategicMergePatch, which panics if the merge key of a list item is not a scalar. It returns
// an error instead.
func mergeStrategically(original, patch []byte, typed any) (merged []byte, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("%v", cause)
		}
	}()
	return strategicpatch.StrategicMergePatch(original, patch, typed)
}

// apply returns a patched copy of obj. It returns an error if the patch changes the kind, name or namespace, or if the
// result is not a valid object of the kind.
func (p patch) apply(obj *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	typed, err := kube.Scheme().New(obj.GroupVersionKind())
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(obj.Object)
	if err != nil {
		return nil, fmt.Errorf("encode it: %w", err)
	}
	if p.operations != nil {
		options := jsonpatch.NewApplyOptions()
		options.AccumulatedCopySizeLimit = maxCopied
		raw, err = p.operations.ApplyWithOptions(raw, options)
	} else {
		raw, err = mergeStrategically(raw, p.merge, typed)
	}
	if err != nil {
		return nil, fmt.Errorf("apply the patch: %w", err)
	}
	changed := &unstructured.Unstructured{}
	if err := json.Unmarshal(raw, &changed.Object); err != nil {
		return nil, fmt.Errorf("decode the result: %w", err)
	}
	if kube.RefOf(changed) != kube.RefOf(obj) {
		return nil, errors.New("apiVersion, kind, name and namespace must stay")
	}
	if err := yaml.UnmarshalStrict(raw, typed); err != nil {
		return nil, fmt.Errorf("it is not valid any more: %w", err)
	}
	return changed, nil
}
