package render

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	kubejson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/kustomize/api/provider"
	"sigs.k8s.io/kustomize/api/resource"
	"sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/resid"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// patchFunction is the name of the function in the sandbox that applies patches. patchLimit is its time limit for all
// patches and objects. maxPatched limits the size of one patched object in bytes.
const (
	patchFunction = "patch"
	patchLimit    = 30 * time.Second
	maxPatched    = 8 << 20
)

// Patch is one patch of a profile, without templates.
type Patch struct {
	// Origin names the patch in errors, for example "patches[0]".
	Origin string `json:"origin"`
	// Text is a list of JSON 6902 operations, or a strategic merge patch.
	Text   string                    `json:"text"`
	Target *libv1beta1.PatchSelector `json:"target,omitempty"`
	// IsPrivate is true if the text can contain text of a Secret.
	IsPrivate bool `json:"-"`
}

// withoutPrivateText returns err without its details if it is about a private patch.
func withoutPrivateText(patches []Patch, err error) error {
	for _, patch := range patches {
		if patch.IsPrivate && strings.HasPrefix(err.Error(), patch.Origin+": ") {
			return source.HideDetails(patch.Origin, err)
		}
	}
	return err
}

// DecodePatches returns the patches in a key of a ConfigMap or Secret: one patch with the fields of an item of
// spec.patches, a list of such patches, or a strategic merge patch that names its object. Errors begin with origin. The
// memory of the texts stays reserved.
func DecodePatches(origin, text string, reserved *kube.ContentReservation) ([]Patch, error) {
	_, added, err := reserved.AddForYAML([]byte(text)) // YAMLToJSON below finds the other errors too
	if kube.IsMemoryError(err) {
		return nil, fmt.Errorf("%s: %w", origin, err)
	}
	defer func() { reserved.Subtract(max(0, added-int64(len(text)))) }()
	raw, err := kube.YAMLToJSON([]byte(text))
	if err != nil {
		return nil, phase.TerminalErrorf("%s: %w", origin, err)
	}
	var list []libv1beta1.Patch
	var single libv1beta1.Patch
	var object map[string]any
	switch {
	case json.Unmarshal(raw, &list) == nil:
	case json.Unmarshal(raw, &single) == nil && single.Patch != "":
		list = []libv1beta1.Patch{single}
	case json.Unmarshal(raw, &object) == nil && object["kind"] != nil:
		list = []libv1beta1.Patch{{Patch: text}}
	default:
		return nil, phase.TerminalErrorf("%s: it has no field patch", origin)
	}
	patches := make([]Patch, 0, len(list))
	for i, patch := range list {
		name := origin
		if len(list) > 1 {
			name = fmt.Sprintf("%s[%d]", origin, i)
		}
		if patch.Patch == "" {
			return nil, phase.TerminalErrorf("%s: it has no field patch", name)
		}
		patches = append(patches, Patch{Origin: name, Text: patch.Patch, Target: patch.Target})
	}
	return patches, nil
}

// patchInput is the input of patchFunction.
type patchInput struct {
	Objects   []json.RawMessage
	Patches   []Patch
	Unpatched []int
}

// patch returns the objects that the patches change, by their index in docs, nil for a deleted object. added is the
// memory that it has reserved for them in changes.Memory, in bytes, also if there is an error.
func (c *Changer) patch(key string, docs [][]byte, changes Changes, unpatched []int) (objects map[int]*unstructured.Unstructured, added int64, err error) {
	if len(changes.Patches) == 0 || len(docs) == 0 {
		return map[int]*unstructured.Unstructured{}, 0, nil
	}
	input := patchInput{Patches: changes.Patches, Unpatched: unpatched}
	for _, doc := range docs {
		input.Objects = append(input.Objects, doc)
	}
	changed := map[int]json.RawMessage{}
	if c.sandbox == nil {
		changed, err = applyPatches(input)
	} else {
		err = c.sandbox.Call(sandbox.Call{
			Function: patchFunction, Scope: changes.Scope, Key: patchFunction + " " + key, Limit: patchLimit, Input: input, Output: &changed, Memory: changes.Memory,
		})
	}
	if limit, ok := errors.AsType[*sandbox.LimitError](err); ok {
		return nil, 0, fmt.Errorf("apply patches: %w", limit)
	}
	if err != nil {
		return nil, 0, withoutPrivateText(changes.Patches, err)
	}
	objects = make(map[int]*unstructured.Unstructured, len(changed))
	for i, raw := range changed {
		needed := kube.MemoryOf(raw, kube.TypeUnstructured)
		if err := changes.Memory.Add(needed); err != nil {
			return nil, added, err
		}
		added += needed
		if i < 0 || i >= len(docs) {
			return nil, added, fmt.Errorf("the sandbox returned index %d of %d objects", i, len(docs))
		}
		var fields map[string]any
		if err := kubejson.Unmarshal(raw, &fields); err != nil { // integers stay integers
			return nil, added, fmt.Errorf("decode a patched object: %w", err)
		}
		objects[i] = nil
		if fields != nil {
			objects[i] = &unstructured.Unstructured{Object: fields}
		}
	}
	return objects, added, nil
}

// patchInSandbox is patchFunction in a child of the sandbox.
func patchInSandbox(input json.RawMessage, _ func(any) (json.RawMessage, error)) (any, error) {
	var p patchInput
	if err := json.Unmarshal(input, &p); err != nil {
		return nil, err
	}
	return applyPatches(p)
}

// applyPatches returns the changed objects by index, null for a deleted object.
func applyPatches(p patchInput) (map[int]json.RawMessage, error) {
	objects := make([]*patchedObject, 0, len(p.Objects))
	for i, raw := range p.Objects {
		if _, isUnpatched := slices.BinarySearch(p.Unpatched, i); isUnpatched {
			continue
		}
		object := &patchedObject{index: i}
		if err := kubejson.Unmarshal(raw, &object.fields); err != nil {
			return nil, err
		}
		objects = append(objects, object)
	}
	for _, patch := range p.Patches {
		parsed, err := parsePatch(patch)
		if err == nil {
			err = parsed.apply(objects)
		}
		if err != nil {
			return nil, phase.TerminalErrorf("%s: %w", patch.Origin, err)
		}
	}
	changed := map[int]json.RawMessage{}
	for _, object := range objects {
		if !object.isChanged {
			continue
		}
		raw, err := json.Marshal(object.fields)
		if err != nil {
			return nil, phase.TerminalErrorf("encode a patched object: %w", err)
		}
		changed[object.index] = raw
	}
	return changed, nil
}

// patchedObject is an object to which patches are applied. Its fields are nil after a patch has deleted it.
type patchedObject struct {
	index     int
	fields    map[string]any
	isChanged bool
}

// parsedPatch is a Patch in the types of kustomize. It has either operations, or objects to merge.
type parsedPatch struct {
	factory    *resource.Factory
	operations jsonpatch.Patch
	merges     []*resource.Resource
	// selector is nil for a strategic merge patch that names its object.
	selector            *types.SelectorRegex
	labels, annotations labels.Selector
}

// parsePatch parses a patch as kustomize does.
func parsePatch(patch Patch) (*parsedPatch, error) {
	raw, err := kube.YAMLToJSON([]byte(patch.Text))
	if err != nil {
		return nil, err
	}
	parsed := &parsedPatch{factory: provider.NewDefaultDepProvider().GetResourceFactory()}
	if len(raw) > 0 && raw[0] == '[' {
		if patch.Target == nil {
			return nil, errors.New("a JSON 6902 patch needs a target")
		}
		if parsed.operations, err = jsonpatch.DecodePatch(raw); err != nil {
			return nil, err
		}
	} else if parsed.merges, err = parsed.factory.SliceFromBytes([]byte(patch.Text)); err != nil {
		return nil, fmt.Errorf("it is neither a JSON 6902 patch nor a strategic merge patch: %w", err)
	}
	switch {
	case len(parsed.operations) == 0 && len(parsed.merges) == 0:
		return nil, errors.New("it is empty")
	case patch.Target == nil:
		return parsed, nil
	case len(parsed.merges) > 1:
		return nil, errors.New("a patch with several documents cannot have a target")
	}
	return parsed, parsed.setTarget(*patch.Target)
}

func (p *parsedPatch) setTarget(target libv1beta1.PatchSelector) (err error) {
	for _, pattern := range []string{target.Group, target.Version, target.Kind, target.Namespace, target.Name} {
		if _, err := kube.CompilePattern(pattern); err != nil {
			return fmt.Errorf("target: %w", err)
		}
	}
	p.selector, err = types.NewSelectorRegex(&types.Selector{ResId: resid.ResId{
		Gvk:  resid.Gvk{Group: target.Group, Version: target.Version, Kind: target.Kind},
		Name: target.Name, Namespace: target.Namespace,
	}})
	if err != nil {
		return fmt.Errorf("target: %w", err)
	}
	if p.labels, err = labels.Parse(target.LabelSelector); err != nil {
		return fmt.Errorf("target.labelSelector: %w", err)
	}
	if p.annotations, err = labels.Parse(target.AnnotationSelector); err != nil {
		return fmt.Errorf("target.annotationSelector: %w", err)
	}
	return nil
}

// apply applies the patch to the objects that it selects. It is no error if there are none.
func (p *parsedPatch) apply(objects []*patchedObject) error {
	for _, object := range objects {
		if object.fields == nil {
			continue
		}
		unchanged := &unstructured.Unstructured{Object: object.fields}
		ref := kube.RefOf(unchanged)
		id := resid.NewResIdWithNamespace(resid.NewGvk(ref.Group, ref.Version, ref.Kind), ref.Name, ref.Namespace)
		var err error
		switch {
		case p.selector == nil:
			for _, merge := range p.merges {
				if err == nil && object.fields != nil && merge.OrgId().Equals(id) {
					err = p.applyMerge(object, merge)
				}
			}
		case !p.selects(unchanged, id):
		case len(p.operations) > 0:
			err = p.applyOperations(object)
		default:
			patch := p.merges[0].DeepCopy()
			patch.SetGvk(id.Gvk)
			err = p.applyMerge(object, patch)
		}
		if err != nil {
			return fmt.Errorf("it cannot be applied to %s: %w", ref, err)
		}
	}
	return nil
}

// selects returns whether an object is a target of the patch.
func (p *parsedPatch) selects(object *unstructured.Unstructured, id resid.ResId) bool {
	return p.selector.MatchGvk(id.Gvk) && p.selector.MatchName(id.Name) &&
		p.selector.MatchNamespace(id.EffectiveNamespace()) &&
		p.labels.Matches(labels.Set(object.GetLabels())) && p.annotations.Matches(labels.Set(object.GetAnnotations()))
}

// applyMerge applies a strategic merge patch to an object.
func (p *parsedPatch) applyMerge(object *patchedObject, patch *resource.Resource) error {
	node, err := p.factory.FromMap(object.fields)
	if err == nil {
		err = node.ApplySmPatch(patch.DeepCopy())
	}
	if err != nil {
		message, _, _ := strings.Cut(err.Error(), ": node contents:") // the patch can be from a Secret
		return errors.New(message)
	}
	if node.IsNilOrEmpty() { // the patch deletes the object
		object.fields, object.isChanged = nil, true
		return nil
	}
	raw, err := node.MarshalJSON()
	if err != nil {
		return err
	}
	return object.set(raw)
}

// applyOperations applies the operations of a JSON 6902 patch to an object.
func (p *parsedPatch) applyOperations(object *patchedObject) error {
	raw, err := json.Marshal(object.fields)
	if err != nil {
		return err
	}
	options := jsonpatch.NewApplyOptions()
	options.AccumulatedCopySizeLimit = maxPatched // each copy operation can double the size
	if raw, err = p.operations.ApplyWithOptions(raw, options); err != nil {
		return err
	}
	return object.set(raw)
}

// set replaces the fields of an object by the fields in raw.
func (o *patchedObject) set(raw []byte) error {
	if len(raw) > maxPatched {
		return fmt.Errorf("the result is larger than %d MiB", maxPatched>>20)
	}
	var fields map[string]any
	if err := kubejson.Unmarshal(raw, &fields); err != nil { // integers stay integers
		return err
	}
	o.fields, o.isChanged = fields, true
	return nil
}
