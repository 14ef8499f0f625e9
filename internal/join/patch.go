package join

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// maxCopied bounds, in bytes, what the copy operations of one JSON 6902 patch may add: as much as a ConfigMap may hold.
const maxCopied = 1 << 20

// patch is one change of an agent's manifest.
type patch struct {
	// origin says where it is from: ConfigMap, key, and which of several it is there.
	origin string
	target target
	// merge is a strategic merge patch in JSON; operations is a JSON 6902 patch, nil unless it is one.
	merge      []byte
	operations jsonpatch.Patch
}

// parsePatches reads one value of a ConfigMap: YAML documents, each of which is a patch or a list of patches.
func parsePatches(origin, text string) ([]patch, error) {
	documents, err := splitYAML(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", origin, err)
	}
	var entries []any
	for _, document := range documents {
		if list, ok := document.([]any); ok && !isOperations(list) {
			entries = append(entries, list...)
			continue
		}
		entries = append(entries, document)
	}
	if len(entries) == 0 {
		return nil, fmt.Errorf("%s: it holds no patch", origin)
	}
	patches := make([]patch, 0, len(entries))
	for i, entry := range entries {
		at := origin
		if len(entries) > 1 {
			at = fmt.Sprintf("%s, patch %d", origin, i+1)
		}
		parsed, err := parseEntry(entry)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		parsed.origin = at
		patches = append(patches, parsed)
	}
	return patches, nil
}

// splitYAML returns the documents of text that are not empty.
func splitYAML(text string) ([]any, error) {
	var documents []any
	reader := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		raw, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read it: %w", err)
		}
		var document any
		if err := yaml.Unmarshal(raw, &document); err != nil {
			return nil, fmt.Errorf("it is not YAML: %w", err)
		}
		if document != nil {
			documents = append(documents, document)
		}
	}
}

// isOperations says whether list is a JSON 6902 patch, and not a list of patches.
func isOperations(list []any) bool {
	for _, element := range list {
		fields, _ := element.(map[string]any)
		if _, ok := fields["op"]; !ok {
			return false
		}
	}
	return len(list) > 0
}

// parseEntry reads {patch, target}, or a patch that stands alone.
func parseEntry(entry any) (patch, error) {
	fields, _ := entry.(map[string]any)
	if _, wrapped := fields["patch"]; !wrapped {
		return newPatch(entry, nil)
	}
	raw, err := json.Marshal(fields)
	if err != nil {
		return patch{}, fmt.Errorf("read it: %w", err)
	}
	var given libv1beta1.Patch
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&given); err != nil {
		return patch{}, fmt.Errorf("it is not {patch, target}: %w", err)
	}
	contents, err := splitYAML(given.Patch)
	if err != nil {
		return patch{}, fmt.Errorf("field patch: %w", err)
	}
	if len(contents) != 1 {
		return patch{}, fmt.Errorf("field patch: it holds %d documents, and must hold one", len(contents))
	}
	return newPatch(contents[0], given.Target)
}

// newPatch makes a patch of content. Without a selector, a strategic merge patch is for the object that it names, and
// anything else for the Deployment.
func newPatch(content any, selector *libv1beta1.PatchSelector) (patch, error) {
	var made patch
	var own libv1beta1.PatchSelector
	switch content := content.(type) {
	case []any:
		raw, err := json.Marshal(content)
		if err != nil {
			return patch{}, fmt.Errorf("read it: %w", err)
		}
		if made.operations, err = jsonpatch.DecodePatch(raw); err != nil || !isOperations(content) {
			return patch{}, errors.New("it is a list, but not of JSON 6902 operations")
		}
	case map[string]any:
		own = namedBy(content)
		if selector != nil {
			// The selector says what is meant, and no patch gives an object another name.
			for _, path := range [][]string{{"apiVersion"}, {"kind"}, {"metadata", "name"}, {"metadata", "namespace"}} {
				unstructured.RemoveNestedField(content, path...)
			}
		}
		raw, err := json.Marshal(content)
		if err != nil {
			return patch{}, fmt.Errorf("read it: %w", err)
		}
		made.merge = raw
	default:
		return patch{}, errors.New("it is neither a strategic merge patch, nor a list of JSON 6902 operations, nor {patch, target}")
	}
	if selector == nil {
		selector = &own
	}
	if *selector == (libv1beta1.PatchSelector{}) {
		selector = &libv1beta1.PatchSelector{Group: "apps", Kind: "Deployment"}
	}
	var err error
	made.target, err = parseTarget(*selector)
	return made, err
}

// namedBy returns the selector of the object that a strategic merge patch names; it is empty if that names no kind.
func namedBy(content map[string]any) libv1beta1.PatchSelector {
	named := unstructured.Unstructured{Object: content}
	gvk := named.GroupVersionKind()
	if gvk.Kind == "" {
		return libv1beta1.PatchSelector{}
	}
	return libv1beta1.PatchSelector{
		Group: regexp.QuoteMeta(gvk.Group), Version: regexp.QuoteMeta(gvk.Version), Kind: regexp.QuoteMeta(gvk.Kind),
		Namespace: regexp.QuoteMeta(named.GetNamespace()), Name: regexp.QuoteMeta(named.GetName()),
	}
}

// target picks documents of a manifest.
type target struct {
	group, version, kind, namespace, name *regexp.Regexp
	labels, annotations                   labels.Selector
}

// parseTarget compiles a selector, whose fields are regular expressions for the whole of what they are compared with.
func parseTarget(selector libv1beta1.PatchSelector) (target, error) {
	var t target
	var err error
	for _, field := range []struct {
		name, text string
		into       **regexp.Regexp
	}{
		{"group", selector.Group, &t.group},
		{"version", selector.Version, &t.version},
		{"kind", selector.Kind, &t.kind},
		{"namespace", selector.Namespace, &t.namespace},
		{"name", selector.Name, &t.name},
	} {
		text := field.text
		if text == "" {
			text = ".*"
		}
		if *field.into, err = regexp.Compile("^(?:" + text + ")$"); err != nil {
			return target{}, fmt.Errorf("target.%s: %w", field.name, err)
		}
	}
	if t.labels, err = labels.Parse(selector.LabelSelector); err != nil {
		return target{}, fmt.Errorf("target.labelSelector: %w", err)
	}
	if t.annotations, err = labels.Parse(selector.AnnotationSelector); err != nil {
		return target{}, fmt.Errorf("target.annotationSelector: %w", err)
	}
	return t, nil
}

func (t target) matches(document map[string]any) bool {
	obj := unstructured.Unstructured{Object: document}
	gvk := obj.GroupVersionKind()
	return t.group.MatchString(gvk.Group) && t.version.MatchString(gvk.Version) && t.kind.MatchString(gvk.Kind) &&
		t.namespace.MatchString(obj.GetNamespace()) && t.name.MatchString(obj.GetName()) &&
		t.labels.Matches(labels.Set(obj.GetLabels())) && t.annotations.Matches(labels.Set(obj.GetAnnotations()))
}

// applyPatches returns the documents of an agent's manifest with patches applied, in order. No patch may hit nothing,
// or take away what the agent needs.
func applyPatches(documents []map[string]any, patches []patch) ([]map[string]any, error) {
	if len(patches) == 0 {
		return documents, nil
	}
	original := make([]map[string]any, len(documents))
	for i, document := range documents {
		// Patches are compared with what is in JSON.
		raw, err := json.Marshal(document)
		if err != nil {
			return nil, fmt.Errorf("encode the manifest: %w", err)
		}
		if err := json.Unmarshal(raw, &original[i]); err != nil {
			return nil, fmt.Errorf("encode the manifest: %w", err)
		}
	}
	now := append([]map[string]any{}, original...)
	for _, p := range patches {
		hits := 0
		for i := range now {
			if !p.target.matches(now[i]) {
				continue
			}
			hits++
			changed, err := p.apply(now[i])
			if err == nil {
				err = checkPatched(original[i], changed)
			}
			if err != nil {
				obj := unstructured.Unstructured{Object: original[i]}
				return nil, fmt.Errorf("%w: %s: %s: %w", ErrPatch, p.origin, kube.RefOf(&obj), err)
			}
			now[i] = changed
		}
		if hits == 0 {
			return nil, fmt.Errorf("%w: %s: it hits nothing in the manifest", ErrPatch, p.origin)
		}
	}
	return now, nil
}

// apply returns document with the patch applied.
func (p patch) apply(document map[string]any) (map[string]any, error) {
	before, err := json.Marshal(document)
	if err != nil {
		return nil, fmt.Errorf("encode it: %w", err)
	}
	var after []byte
	if p.operations != nil {
		options := jsonpatch.NewApplyOptions()
		options.AccumulatedCopySizeLimit = maxCopied
		after, err = p.operations.ApplyWithOptions(before, options)
	} else {
		after, err = strategicpatch.StrategicMergePatch(before, p.merge, typeOf(document))
	}
	if err != nil {
		return nil, fmt.Errorf("apply the patch: %w", err)
	}
	var changed map[string]any
	if err := json.Unmarshal(after, &changed); err != nil {
		return nil, fmt.Errorf("decode what the patch leaves: %w", err)
	}
	return changed, nil
}
