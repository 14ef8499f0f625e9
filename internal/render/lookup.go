package render

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	helmrelease "helm.sh/helm/v4/pkg/release/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	kubejson "k8s.io/apimachinery/pkg/util/json"

	"github.com/towline/towline/internal/kube"
)

const (
	// lookupPrefix is the prefix of the keys of results of lookup.
	lookupPrefix = "lookup "
	// renderedPrefix is the prefix of the keys of rendered objects.
	renderedPrefix = "rendered "
	// maxLookup is the maximum size in bytes of the stored results of lookup of one release, and also of its rendered
	// objects.
	maxLookup = 64 << 10
)

// LookupFunc reads objects of a cluster for templates: one object, or a list if name is empty. It returns an empty map
// if the object or kind does not exist.
type LookupFunc = func(apiVersion, kind, namespace, name string) (map[string]any, error)

// lookupCall is a call of lookup.
type lookupCall struct{ apiVersion, kind, namespace, name string }

func (l lookupCall) String() string {
	return fmt.Sprintf("%s %s %s/%s", l.apiVersion, l.kind, l.namespace, l.name)
}

func (l lookupCall) digest() string {
	return fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join([]string{l.apiVersion, l.kind, l.namespace, l.name}, "\x00"))))
}

// isStorable returns whether the call is for one Secret or ConfigMap. Without access to the member, other kinds cannot
// be answered: templates read fields that the API server or a controller sets, such as the status.
func (l lookupCall) isStorable() bool {
	return l.apiVersion == "v1" && (l.kind == "Secret" || l.kind == "ConfigMap") && l.name != ""
}

// resultKey returns the key of the result of a call in Generated. An installation and an upgrade have different keys.
func (c *templateFunctions) resultKey(call lookupCall) string {
	return lookupPrefix + c.inputs + " " + c.operation + " " + call.digest()
}

// lookupCallFor returns the call that finds a rendered object. namespace is the namespace of the release, the default
// for the object.
func lookupCallFor(object *unstructured.Unstructured, namespace string) lookupCall {
	return lookupCall{object.GetAPIVersion(), object.GetKind(), cmp.Or(object.GetNamespace(), namespace), object.GetName()}
}

// renderedKey returns the key of the rendered object in Generated.
func (l lookupCall) renderedKey() string { return renderedPrefix + l.digest() }

// lookUp implements the template function lookup. It stores the result of the first call, and returns it again as long
// as the inputs and the operation of the release are the same.
func (c *templateFunctions) lookUp(apiVersion, kind, namespace, name string) (map[string]any, error) {
	call := lookupCall{apiVersion, kind, namespace, name}
	if c.lookup == nil && (!c.forMember || !call.isStorable()) {
		c.unanswered = true
		if call.isStorable() {
			c.lookedUp[call] = true
		}
		return map[string]any{}, nil
	}
	key := c.resultKey(call)
	stored, ok := c.used[key]
	if !ok {
		stored, ok = c.stored[key]
	}
	if !ok {
		var err error
		if stored, err = c.readObject(call); err != nil {
			c.lookupErr = fmt.Errorf("look up %s: %w", call, err)
			return nil, c.lookupErr
		}
	}
	c.used[key], c.lookedUp[call] = stored, true
	var found map[string]any
	err := kubejson.Unmarshal(stored, &found) // integers stay integers
	c.memberSpecific = c.memberSpecific || c.lookup != nil || len(found) > 0
	return found, err
}

// looksUpOwnObject returns whether a call of lookup finds one of the rendered objects after they are applied. namespace
// is the namespace of the release.
func (c *templateFunctions) looksUpOwnObject(objects []*unstructured.Unstructured, namespace string) bool {
	return slices.ContainsFunc(objects, func(object *unstructured.Unstructured) bool {
		return c.lookedUp[lookupCallFor(object, namespace)] && remainsOnMember(object)
	})
}

// readObject returns the object from the member or, without c.lookup, the stored object. It returns "{}" if there is
// none.
func (c *templateFunctions) readObject(call lookupCall) (json.RawMessage, error) {
	if c.lookup != nil {
		found, err := c.lookup(call.apiVersion, call.kind, call.namespace, call.name)
		if err != nil {
			return nil, err
		}
		return json.Marshal(found)
	}
	if rendered, ok := c.stored[call.renderedKey()]; ok {
		return rendered, nil
	}
	return json.RawMessage("{}"), nil
}

// storeRendered adds to the results the rendered objects that the templates look up, for the next upgrade. It does
// nothing if lookup reads the member. In a rendering for all members there is nothing to store: buildRelease has ended
// it if looksUpOwnObject. If the objects together are too large, it omits the largest ones. objects are all objects of
// the release, and namespace is its namespace.
func (c *templateFunctions) storeRendered(objects []*unstructured.Unstructured, namespace string) error {
	if c.lookup != nil {
		return nil
	}
	kept := map[lookupCall]json.RawMessage{}
	for call := range c.lookedUp {
		if former := c.stored[call.renderedKey()]; hasKeepPolicy(former) {
			kept[call] = former // the object remains on the member even if the release no longer has it
		}
	}
	for _, object := range objects {
		call := lookupCallFor(object, namespace)
		former, isStored := c.stored[call.renderedKey()]
		switch {
		case !c.lookedUp[call] || !remainsOnMember(object):
		case isStored && !isAppliedByUpgrade(object):
			kept[call] = former // a hook of only the installation: the member has the former object
		default:
			result, err := lookupResult(object, call.namespace)
			if err != nil {
				return fmt.Errorf("encode %s: %w", call, err)
			}
			kept[call] = result
		}
	}
	compareSize := func(a, b lookupCall) int {
		return cmp.Or(cmp.Compare(len(kept[a]), len(kept[b])), strings.Compare(a.digest(), b.digest()))
	}
	size := 0
	for _, call := range slices.SortedFunc(maps.Keys(c.lookedUp), compareSize) {
		key := call.renderedKey()
		object, isKept := kept[call]
		if isKept && size+len(key)+len(object) <= maxLookup {
			size += len(key) + len(object)
			c.used[key] = object
			continue
		}
		// Lookup will not find the object in the next rendering. If this call has found nothing either, it counts as
		// unanswered, and its result need not be stored.
		if result := c.resultKey(call); string(c.used[result]) == "{}" {
			c.unanswered = true
			delete(c.used, result)
		}
	}
	return nil
}

// lookupResult returns a rendered Secret or ConfigMap as the API server returns it, without the metadata that the API
// server sets.
func lookupResult(object *unstructured.Unstructured, namespace string) (json.RawMessage, error) {
	result := object.DeepCopy()
	result.SetNamespace(namespace)
	if texts, ok := result.Object["stringData"].(map[string]any); ok {
		data, ok := result.Object["data"].(map[string]any)
		if !ok {
			data = map[string]any{}
		}
		for key, value := range texts {
			if text, ok := value.(string); ok {
				data[key] = base64.StdEncoding.EncodeToString([]byte(text))
			}
		}
		result.Object["data"] = data
		delete(result.Object, "stringData")
	}
	return json.Marshal(result.Object)
}

// hasKeepPolicy returns whether the encoded object stays on the member after its release no longer has it.
func hasKeepPolicy(encoded json.RawMessage) bool {
	object := &unstructured.Unstructured{}
	if err := kubejson.Unmarshal(encoded, &object.Object); err != nil {
		return false // there is no object
	}
	return object.GetAnnotations()[kube.AnnotationKeep] == "keep"
}

// remainsOnMember returns whether, after an installation, the member still has the object as rendered. A hook may run
// at another time, or be deleted after its success. Kubernetes adds data to a service account token.
func remainsOnMember(object *unstructured.Unstructured) bool {
	if object.Object["type"] == string(corev1.SecretTypeServiceAccountToken) {
		return false
	}
	annotations := object.GetAnnotations()
	events, isHook := annotations[helmrelease.HookAnnotation]
	isDeleted := strings.Contains(annotations[helmrelease.HookDeleteAnnotation], helmrelease.HookSucceeded.String())
	return !isHook || strings.Contains(strings.ToLower(events), "-install") && !isDeleted
}

// isAppliedByUpgrade returns whether an upgrade applies an object.
func isAppliedByUpgrade(object *unstructured.Unstructured) bool {
	events, isHook := object.GetAnnotations()[helmrelease.HookAnnotation]
	return !isHook || strings.Contains(strings.ToLower(events), "-upgrade")
}
