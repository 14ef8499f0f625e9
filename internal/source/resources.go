package source

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	kubejson "k8s.io/apimachinery/pkg/util/json"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/phase"
)

// MaxResourcesSize is the maximum size of the Resources of a TemplateContext in bytes of JSON.
const MaxResourcesSize = 16 << 20

// Resources are the objects of the hub that the templates of a TemplateContext can read (templateResourceRefs).
type Resources struct {
	// Objects has the JSON of the objects by identifier, without managedFields.
	Objects map[string]json.RawMessage
	// Absent are the identifiers of optional objects that do not exist.
	Absent []string
	// HasSecret is true if one of the objects is a Secret.
	HasSecret bool
	// Digest identifies the references and the content of their objects. It stays the same after a change that a reference
	// ignores, until a restart: internal/hub/resources returns the former version of the object until then.
	Digest string
}

// decode returns the objects by identifier.
func (r Resources) decode() (map[string]any, error) {
	objects := map[string]any{}
	for identifier, raw := range r.Objects {
		var object map[string]any
		if err := kubejson.Unmarshal(raw, &object); err != nil { // integers stay integers
			return nil, fmt.Errorf("decode the object %s: %w", identifier, err)
		}
		objects[identifier] = object
	}
	return objects, nil
}

// ResourceReference identifies an object of any kind on the hub, and the changes of it that cause a new reconcile.
type ResourceReference struct {
	APIVersion, Kind, Namespace, Name string
	// IgnoreStatus is true if changes of the status are ignored. It has no effect together with WatchFields.
	IgnoreStatus bool
	// WatchFields are the paths, separated by line breaks, whose changes are not ignored. "" means all fields, except the
	// status with IgnoreStatus.
	WatchFields string
}

// String returns r for messages, for example "apps/v1 Deployment eu/web".
func (r ResourceReference) String() string {
	text := r.Kind + " " + r.Name
	if r.Namespace != "" {
		text = r.Kind + " " + r.Namespace + "/" + r.Name
	}
	if r.APIVersion == "v1" {
		return text
	}
	return r.APIVersion + " " + text
}

// ResolveResource expands the templates in ref for the template context. The namespace defaults to the cluster's
// namespace. All errors are phase.TerminalError, for example if TemplateContext.RestrictedNamespace does not allow the
// namespace.
func ResolveResource(ref configv1beta1.TemplateResourceRef, tmplCtx TemplateContext) (ResourceReference, error) {
	tmplCtx.Resources = Resources{} // they are not read yet
	groupVersion, err := schema.ParseGroupVersion(cmp.Or(ref.Resource.APIVersion, "v1"))
	if err != nil || groupVersion.Version == "" {
		return ResourceReference{}, phase.TerminalErrorf("apiVersion %q is invalid", ref.Resource.APIVersion)
	}
	resolved := ResourceReference{
		APIVersion: groupVersion.String(), Kind: ref.Resource.Kind,
		IgnoreStatus: ref.IgnoreStatusChanges, WatchFields: strings.Join(ref.WatchFields, "\n"),
	}
	for _, path := range ref.WatchFields {
		if strings.ContainsAny(path, "[]{}*\n") || len(pathSegments(path)) == 0 {
			return ResourceReference{}, phase.TerminalErrorf("watchFields: %q is neither names that are separated by dots nor a JSON pointer", path)
		}
	}
	if resolved.Name, err = tmplCtx.Expand("name of a "+resolved.Kind, ref.Resource.Name); err != nil {
		return ResourceReference{}, err
	}
	if resolved.Namespace, err = tmplCtx.Expand("namespace of "+resolved.Kind+" "+resolved.Name, ref.Resource.Namespace); err != nil {
		return ResourceReference{}, err
	}
	resolved.Namespace = cmp.Or(resolved.Namespace, tmplCtx.Namespace)
	if resolved.Kind == "" || resolved.Name == "" {
		return ResourceReference{}, phase.TerminalErrorf("the reference to %s needs a kind and a name", resolved)
	}
	if tmplCtx.RestrictedNamespace != "" && resolved.Namespace != tmplCtx.RestrictedNamespace {
		return ResourceReference{}, phase.TerminalErrorf("%s: a Profile reads its own namespace %s only", resolved, tmplCtx.RestrictedNamespace)
	}
	return resolved, nil
}

// Digest returns the digest of the parts of object whose changes are not ignored. object is nil if it does not exist.
func (r ResourceReference) Digest(object map[string]any) (string, error) {
	var relevant any = object
	switch {
	case object == nil:
		relevant = nil
	case r.WatchFields != "":
		values := []any{}
		for path := range strings.SplitSeq(r.WatchFields, "\n") {
			value, found := valueAt(object, pathSegments(path))
			values = append(values, value, found)
		}
		relevant = values
	case r.IgnoreStatus:
		relevant = withoutStatus(object)
	}
	raw, err := json.Marshal(relevant)
	if err != nil {
		return "", fmt.Errorf("encode %s: %w", r, err)
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}

// withoutStatus returns a copy of object without its status and its resourceVersion.
func withoutStatus(object map[string]any) map[string]any {
	stripped := (&unstructured.Unstructured{Object: object}).DeepCopy()
	stripped.SetResourceVersion("")
	unstructured.RemoveNestedField(stripped.Object, "status")
	return stripped.Object
}

// pathSegments returns the segments of a JSON pointer or of a path with dots, nil if a segment of the latter is empty.
func pathSegments(path string) []string {
	if pointer, ok := strings.CutPrefix(path, "/"); ok {
		segments := strings.Split(pointer, "/")
		for i := range segments {
			segments[i] = strings.NewReplacer("~1", "/", "~0", "~").Replace(segments[i])
		}
		return segments
	}
	segments := strings.Split(strings.TrimPrefix(path, "."), ".")
	if slices.Contains(segments, "") {
		return nil
	}
	return segments
}

// valueAt returns the value at a path, and false if there is none. In a list, a segment is the index of an item.
func valueAt(value any, segments []string) (any, bool) {
	for _, segment := range segments {
		switch container := value.(type) {
		case map[string]any:
			next, ok := container[segment]
			if !ok {
				return nil, false
			}
			value = next
		case []any:
			index, err := strconv.Atoi(segment)
			if err != nil || index < 0 || index >= len(container) {
				return nil, false
			}
			value = container[index]
		default:
			return nil, false
		}
	}
	return value, true
}
