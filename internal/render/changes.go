package render

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
)

// maxChangedSize limits the cache of a Changer, in bytes of memory.
const maxChangedSize = 32 << 20

// Changes are the changes of a profile to all its objects. The patches are applied first, in their order.
type Changes struct {
	Patches []Patch `json:"patches,omitempty"`
	// Labels and Annotations are set on all objects, and replace existing values.
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	// Sensitive is true if a patch is from a Secret.
	Sensitive bool `json:"-"`
	// Scope is the Scope of the sandbox.Call. Only calls with the same Scope share a result.
	Scope string `json:"-"`
	// Memory reserves the memory of the result, and is released by the caller. Nil means no limit.
	Memory *kube.ContentReservation `json:"-"`
}

// IsEmpty returns whether there are no changes.
func (c Changes) IsEmpty() bool {
	return len(c.Patches) == 0 && len(c.Labels) == 0 && len(c.Annotations) == 0
}

// Validate returns an error for a label or an annotation that the API server would refuse, or that only Towline sets.
func (c Changes) Validate() error {
	for _, field := range []struct {
		name      string
		values    map[string]string
		isInvalid func(string) []string
	}{
		{"extraLabels", c.Labels, validation.IsValidLabelValue},
		{"extraAnnotations", c.Annotations, func(string) []string { return nil }},
	} {
		for _, key := range slices.Sorted(maps.Keys(field.values)) {
			if kube.IsReservedKey(key) {
				return phase.TerminalErrorf("%s: only Towline sets %s", field.name, key)
			}
			problems := append(validation.IsQualifiedName(key), field.isInvalid(field.values[key])...)
			if len(problems) > 0 {
				return phase.TerminalErrorf("%s: %s: %s", field.name, key, problems[0])
			}
		}
	}
	return nil
}

// Digest returns a digest of the changes, "" if there are none.
func (c Changes) Digest() (string, error) {
	if c.IsEmpty() {
		return "", nil
	}
	raw, err := json.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("encode the patches: %w", err)
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}

// Changer changes the objects of profiles, once for all members with the same objects and Changes. It is safe for
// concurrent use.
type Changer struct {
	sandbox *sandbox.Pool
	changed *cache.Cache[Changed]
}

// NewChanger returns a Changer with an empty cache, which applies patches in the sandbox. Without a sandbox it applies
// them in this process, and a patch that needs too much time or memory is not stopped.
func NewChanger(inSandbox *sandbox.Pool) *Changer {
	return &Changer{sandbox: inSandbox, changed: cache.New[Changed](maxChangedSize)}
}

// Changed is the result of Changer.Change. Callers share it and must not change it.
type Changed struct {
	Objects   []*unstructured.Unstructured
	Documents *kube.Documents
	// Indexes has, for each object, its index in the parameter objects of Change. Patches can delete objects.
	Indexes []int
}

// Change applies the changes to objects, whose JSON documents caches. unpatched has the sorted indexes of the objects
// to which patches are not applied. It returns a phase.TerminalError for a patch that is invalid or cannot be applied,
// and a sandbox.LimitError for patches that need too much time or memory.
func (c *Changer) Change(objects []*unstructured.Unstructured, documents *kube.Documents, changes Changes, unpatched []int) (Changed, error) {
	objectsDigest, err := documents.Digest(objects)
	if err != nil {
		return Changed{}, phase.TerminalError{Err: err}
	}
	changesDigest, err := changes.Digest()
	if err != nil {
		return Changed{}, err
	}
	key := fmt.Sprintf("%x %s %v %s", objectsDigest, changesDigest, unpatched, changes.Scope)
	return c.changed.GetOrCompute(key, func() (Changed, int, error) {
		docs, err := documents.Encode(objects)
		if err != nil {
			return Changed{}, 0, phase.TerminalError{Err: err}
		}
		patched, reserved, err := c.patch(key, docs, changes, unpatched)
		if err != nil {
			changes.Memory.Subtract(reserved)
			return Changed{}, 0, err
		}
		var result Changed
		for i, object := range objects {
			if replacement, ok := patched[i]; ok {
				object = replacement
			}
			if object == nil {
				continue
			}
			if object, err = changes.setMetadata(object); err != nil {
				changes.Memory.Subtract(reserved)
				return Changed{}, 0, err
			}
			result.Objects, result.Indexes = append(result.Objects, object), append(result.Indexes, i)
		}
		result.Documents = kube.NewDocuments(result.Objects)
		// MoveToDocuments releases reserved also if it fails.
		if err := changes.Memory.MoveToDocuments(result.Documents, reserved); err != nil {
			return Changed{}, 0, err
		}
		return result, cache.MinSize + int(result.Documents.Memory()), nil
	})
}

// setMetadata returns a copy of an object with the labels and the annotations.
func (c Changes) setMetadata(object *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	metadata, ok := object.Object["metadata"].(map[string]any)
	if !ok || len(c.Labels)+len(c.Annotations) == 0 {
		return object, nil // the engine refuses an object without metadata
	}
	metadata = maps.Clone(metadata)
	for name, added := range map[string]map[string]string{"labels": c.Labels, "annotations": c.Annotations} {
		existing, ok := metadata[name].(map[string]any)
		switch {
		case len(added) == 0:
			continue
		case !ok && metadata[name] != nil:
			return nil, phase.TerminalErrorf("metadata.%s of %s is not a map", name, kube.RefOf(object))
		case !ok:
			existing = map[string]any{}
		}
		existing = maps.Clone(existing)
		for key, value := range added {
			existing[key] = value
		}
		metadata[name] = existing
	}
	changed := maps.Clone(object.Object)
	changed["metadata"] = metadata
	return &unstructured.Unstructured{Object: changed}, nil
}
