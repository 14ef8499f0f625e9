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

// patchesAnnotation on Namespace kube.AgentNamespace of the hub is the <namespace>/<name> of the default ConfigMap with
// patches, for clusters without annotation libv1beta1.AgentConfigAnnotation.
const patchesAnnotation = "towline.dev/agent-patch-config-map"

// defaultPatchesSource names in errors where the reference to the default ConfigMap is from.
const defaultPatchesSource = "--agent-patch-config-map of the hub"

// PublishPatches records the default patch ConfigMap, as <namespace>/<name>, on Namespace kube.AgentNamespace, "" for
// none. The hub and sveltosctl read it when they create the manifest of a pull-mode cluster that has no annotation
// libv1beta1.AgentConfigAnnotation. The ConfigMap may be created later.
func PublishPatches(ctx context.Context, hub client.Client, configMap string) error {
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

// ParsePatchesReference parses the <namespace>/<name> of a ConfigMap. It returns an error for an invalid name.
func ParsePatchesReference(text string) (client.ObjectKey, error) {
	namespace, name, _ := strings.Cut(text, "/")
	if len(validation.IsDNS1123Label(namespace)) > 0 || len(validation.IsDNS1123Subdomain(name)) > 0 {
		return client.ObjectKey{}, fmt.Errorf("%q is not <namespace>/<name> of a ConfigMap", text)
	}
	return client.ObjectKey{Namespace: namespace, Name: name}, nil
}

// patchesFor returns the patches for a cluster's manifest in the order of their keys, nil without a patch ConfigMap. It
// reads the metadata of a namespace from cache.
func patchesFor(ctx context.Context, hub, cache client.Reader, cluster *libv1beta1.SveltosCluster) ([]patch, error) {
	reference := cluster.Annotations[libv1beta1.AgentConfigAnnotation]
	referenceSource := "annotation " + libv1beta1.AgentConfigAnnotation
	if reference == "" {
		namespace := metadataOf("Namespace")
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
		// A user who may annotate clusters in one namespace must not read the ConfigMaps of others, or learn which exist.
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

// maxCopied is the maximum size, in bytes, of the results of all copy operations of one JSON 6902 patch.
const maxCopied = 1 << 20

// patch is one patch of an agent's manifest.
type patch struct {
	// origin names the ConfigMap and the key of the patch in errors.
	origin string
	// target selects the objects to which the patch applies. An empty field selects all.
	target libv1beta1.PatchSelector
	// merge is a strategic merge patch in JSON. It is nil if operations is set.
	merge []byte
	// operations is a JSON 6902 patch. It is nil if merge is set.
	operations jsonpatch.Patch
}

// parsePatch parses a patch: {patch, target}, or the patch alone. Without a target, a strategic merge patch with a kind
// selects the object with its kind, namespace and name. All other patches select the Deployment.
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
			// The target selects the objects. A patch must not change their kind or name.
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

// decodeDocument decodes text. It returns an error if text is not YAML or has more than one document.
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

// selectorOf returns the selector of the object that a strategic merge patch names.
func selectorOf(object *unstructured.Unstructured) libv1beta1.PatchSelector {
	gvk := object.GroupVersionKind()
	return libv1beta1.PatchSelector{
		Group: regexp.QuoteMeta(gvk.Group), Version: regexp.QuoteMeta(gvk.Version), Kind: regexp.QuoteMeta(gvk.Kind),
		Namespace: regexp.QuoteMeta(object.GetNamespace()), Name: regexp.QuoteMeta(object.GetName()),
	}
}

// selects returns whether the target of the patch selects obj. It returns an error for an invalid expression or
// selector.
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

// applyTo replaces the selected objects with patched ones. It returns ErrPatch if the patch selects none or fails.
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

// mergeStrategically is strategicpatch.StrategicMergePatch, which panics if the key of a list item is not a scalar.
func mergeStrategically(original, patch []byte, typed any) (merged []byte, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("%v", cause)
		}
	}()
	return strategicpatch.StrategicMergePatch(original, patch, typed)
}

// apply returns obj with the patch applied. It returns an error if the patch changes the kind, name or namespace of
// obj, or if the result is not a valid object of the kind.
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
