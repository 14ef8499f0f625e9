package charts

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	helm "helm.sh/helm/v4/pkg/release/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"

	"github.com/towline/towline/internal/kube"
)

// objects are objects by kind, namespace and name.
type objects map[string]*unstructured.Unstructured

// rendering has the objects that helm renders for a chart.
type rendering struct {
	// crds come from the crds directories.
	crds, manifest, hooks objects
}

func (c *comparison) render(values string, upgrade bool) rendering {
	c.Helper()
	r, err := c.tryRender(values, upgrade)
	if err != nil {
		c.Fatal(err)
	}
	return r
}

// tryRender returns the output of `helm template`, with the version and the API versions of the member.
func (c *comparison) tryRender(values string, upgrade bool) (rendering, error) {
	file := filepath.Join(c.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
		return rendering{}, err
	}
	r := rendering{crds: maps.Clone(c.crds), manifest: objects{}, hooks: objects{}}
	version, err := c.member.discovery.ServerVersion()
	if err != nil {
		return rendering{}, err
	}
	args := []string{
		"template", c.chart, c.archive, "-n", namespace, "-f", file, "--kube-version", version.GitVersion, "--api-versions", strings.Join(c.apis, ","),
	}
	if upgrade { // its templates look up passwords that the installation generated
		args = append(args, "--is-upgrade", "--dry-run=server")
	}
	text, err := run(c.Context(), c.member.plane, "", "helm", args...)
	if err != nil {
		return rendering{}, err
	}
	all, err := c.decode(text)
	if err != nil {
		return rendering{}, err
	}
	for key, object := range all {
		if _, isHook := object.GetAnnotations()[helm.HookAnnotation]; isHook {
			r.hooks[key] = object
		} else {
			r.manifest[key] = object
		}
	}
	return r, nil
}

// apiVersions returns the API versions of the member, and the ones that the CRDs of the chart add.
func (c *comparison) apiVersions(crds objects) ([]string, error) {
	_, lists, err := c.member.discovery.ServerGroupsAndResources()
	if err != nil && !discovery.IsGroupDiscoveryFailedError(err) {
		return nil, err
	}
	var versions []string
	for _, list := range lists {
		versions = append(versions, list.GroupVersion)
		for _, resource := range list.APIResources {
			versions = append(versions, list.GroupVersion+"/"+resource.Kind)
		}
	}
	for _, crd := range crds {
		group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
		kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
		served, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
		for _, version := range served {
			if version, ok := version.(map[string]any); ok {
				api := fmt.Sprintf("%s/%v", group, version["name"])
				versions = append(versions, api, api+"/"+kind)
			}
		}
	}
	slices.Sort(versions)
	return slices.Compact(versions), nil
}

// randomPaths returns the paths at which a second rendering of the chart differs from the first.
func (c *comparison) randomPaths(first rendering) paths {
	second := c.render(c.values, false)
	random := paths{}
	for _, line := range slices.Concat(differences(first.manifest, second.manifest, nil), differences(first.hooks, second.hooks, nil)) {
		path, _, _ := strings.Cut(line, ": ")
		random[path] = true
		if key, found := strings.CutSuffix(line, ": missing"); found {
			random[scopeOf(key)] = true // its name is random
		}
	}
	if len(random) > 0 {
		c.addNote("random values at %d paths", len(random))
	}
	return random
}

// decode reads a manifest. Namespaced objects without a namespace get the namespace of the release.
func (c *comparison) decode(manifest string) (objects, error) {
	list, err := kube.DecodeLenient([]byte(manifest))
	if err != nil {
		return nil, err
	}
	found := objects{}
	for _, object := range list {
		resource, err := c.member.mapper.ResourceInAnyVersion(object.GroupVersionKind())
		if err == nil && resource.Namespaced && object.GetNamespace() == "" {
			object.SetNamespace(namespace)
		}
		if err == nil && !resource.Namespaced {
			object.SetNamespace("")
		}
		found[keyOf(object)] = object
	}
	return found, nil
}

func keyOf(object *unstructured.Unstructured) string {
	gvk := object.GroupVersionKind()
	return fmt.Sprintf("%s.%s %s/%s", gvk.Kind, gvk.Group, object.GetNamespace(), object.GetName())
}

// scopeOf returns the kind and the namespace of a key.
func scopeOf(key string) string {
	scope, _, _ := strings.Cut(key, "/")
	return scope
}

// compare returns the differences of the release record, the live objects and the recorded hooks from helm's rendering.
func (c *comparison) compare(want rendering) (found, hooks []string) {
	c.Helper()
	c.member.mapper.Reset()
	manifest, err := c.decode(mustRun(c.T, c.member.plane, "helm", "get", "manifest", "-n", namespace, c.chart))
	if err != nil {
		c.Fatal(err)
	}
	recorded, err := c.decode(mustRun(c.T, c.member.plane, "helm", "get", "hooks", "-n", namespace, c.chart))
	if err != nil {
		c.Fatal(err)
	}
	for _, of := range []*objects{&want.manifest, &want.hooks, &want.crds} {
		*of = c.withNamespaces(*of)
	}
	for _, line := range differences(want.manifest, manifest, c.random) {
		found = append(found, "helm get manifest: "+line)
	}
	for _, key := range slices.Sorted(maps.Keys(want.crds)) {
		found = append(found, c.compareLive(key, want.crds[key])...)
	}
	// Where values are random, the record has the deployed ones.
	applied := want.manifest
	if len(c.random) > 0 {
		applied = manifest
	}
	for _, key := range slices.Sorted(maps.Keys(applied)) {
		found = append(found, c.compareLive(key, applied[key])...)
	}
	return found, differences(want.hooks, recorded, c.random)
}

// withNamespaces sets the namespaces again, now that the kinds of the chart's CRDs are known.
func (c *comparison) withNamespaces(of objects) objects {
	fresh := objects{}
	for _, object := range of {
		resource, err := c.member.mapper.ResourceInAnyVersion(object.GroupVersionKind())
		switch {
		case err != nil:
		case !resource.Namespaced:
			object.SetNamespace("")
		case object.GetNamespace() == "":
			object.SetNamespace(namespace)
		}
		fresh[keyOf(object)] = object
	}
	return fresh
}

// compareLive returns the differences between the live object and the result of applying the rendered one to it, as a
// dry run: fields that are applied and not rendered, or rendered and not applied.
func (c *comparison) compareLive(key string, rendered *unstructured.Unstructured) []string {
	resource, err := c.member.mapper.Resource(rendered.GroupVersionKind())
	if err != nil {
		return []string{key + ": " + err.Error()}
	}
	api := c.member.objects.Resource(resource.GVR).Namespace(rendered.GetNamespace())
	live, err := api.Get(c.Context(), rendered.GetName(), metav1.GetOptions{})
	if err != nil {
		return []string{key + ": " + err.Error()}
	}
	raw, err := json.Marshal(withOwnershipMetadata(rendered, live))
	if err != nil {
		return []string{key + ": " + err.Error()}
	}
	force := true
	applied, err := api.Patch(c.Context(), rendered.GetName(), types.ApplyPatchType, raw,
		metav1.PatchOptions{FieldManager: kube.FieldManager, Force: &force, DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		if apierrors.IsInternalError(err) || apierrors.IsInvalid(err) {
			c.addNote("%s cannot be compared: %s", key, err)
			return nil
		}
		return []string{key + ": apply as a dry run: " + err.Error()}
	}
	return diff("live "+key, comparableContent(applied), comparableContent(live), nil)
}

// withOwnershipMetadata returns a rendered object with the ownership labels and annotations of the live one. Without
// them the API server gives a Job without labels the labels of its pods.
func withOwnershipMetadata(rendered, live *unstructured.Unstructured) *unstructured.Unstructured {
	marked := rendered.DeepCopy()
	for _, field := range []string{"labels", "annotations"} {
		all, _, _ := unstructured.NestedStringMap(marked.Object, "metadata", field)
		marks, _, _ := unstructured.NestedStringMap(live.Object, "metadata", field)
		maps.DeleteFunc(marks, func(name, _ string) bool { return !isOwnershipMetadata(name, live.GetKind()) })
		if len(marks) == 0 {
			continue
		}
		if all == nil {
			all = map[string]string{}
		}
		maps.Copy(all, marks)
		_ = unstructured.SetNestedStringMap(marked.Object, all, "metadata", field) // metadata is a map, since it has the name
	}
	return marked
}

// comparableContent returns the content of an object without the labels and annotations of Towline and Helm, and
// without the fields that the API server sets.
func comparableContent(object *unstructured.Unstructured) map[string]any {
	copied := object.DeepCopy()
	for _, field := range []string{"managedFields", "resourceVersion", "generation", "creationTimestamp", "uid"} {
		unstructured.RemoveNestedField(copied.Object, "metadata", field)
	}
	unstructured.RemoveNestedField(copied.Object, "status")
	for _, field := range []string{"labels", "annotations"} {
		kept, _, _ := unstructured.NestedMap(copied.Object, "metadata", field)
		maps.DeleteFunc(kept, func(name string, _ any) bool { return isOwnershipMetadata(name, copied.GetKind()) })
		if len(kept) == 0 {
			unstructured.RemoveNestedField(copied.Object, "metadata", field)
		} else {
			_ = unstructured.SetNestedMap(copied.Object, kept, "metadata", field) // it was a map before
		}
	}
	return copied.Object
}

// isOwnershipMetadata returns whether Towline or Helm sets a label or annotation on objects of a kind. Towline
// annotates the CRDs of crds directories as kept.
func isOwnershipMetadata(name, kind string) bool {
	prefix, _, _ := strings.Cut(name, "/")
	return name == "app.kubernetes.io/managed-by" || slices.Contains([]string{"projectsveltos.io", "towline.dev", "meta.helm.sh"}, prefix) ||
		name == kube.AnnotationKeep && kind == "CustomResourceDefinition"
}

// paths are paths of values in objects.
type paths map[string]bool

// differences returns how got differs from want, as PATH: DIFFERENCE.
func differences(want, got objects, ignored paths) []string {
	var found []string
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if got[key] == nil {
			if !ignored[scopeOf(key)] {
				found = append(found, key+": missing")
			}
			continue
		}
		found = append(found, diff(key, comparableContent(want[key]), comparableContent(got[key]), ignored)...)
	}
	for _, key := range slices.Sorted(maps.Keys(got)) {
		if want[key] == nil && !ignored[scopeOf(key)] {
			found = append(found, key+": not wanted")
		}
	}
	return found
}

// diff returns the paths at which two values differ, except for ignored ones.
func diff(path string, want, got any, ignored paths) []string {
	if ignored[path] {
		return nil
	}
	switch want := want.(type) {
	case map[string]any:
		got, ok := got.(map[string]any)
		if !ok {
			return []string{path + ": is no map"}
		}
		names := slices.Collect(maps.Keys(want))
		for name := range got {
			if _, ok := want[name]; !ok {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		var found []string
		for _, name := range names {
			found = append(found, diff(path+"."+name, want[name], got[name], ignored)...)
		}
		return found
	case []any:
		got, ok := got.([]any)
		if !ok || len(got) != len(want) {
			return []string{fmt.Sprintf("%s: want %d elements, got %v", path, len(want), abbreviate(got))}
		}
		var found []string
		for i := range want {
			found = append(found, diff(fmt.Sprintf("%s[%d]", path, i), want[i], got[i], ignored)...)
		}
		return found
	}
	if reflect.DeepEqual(want, got) {
		return nil
	}
	return []string{fmt.Sprintf("%s: want %s, got %s", path, abbreviate(want), abbreviate(got))}
}

func abbreviate(value any) string {
	text := fmt.Sprintf("%#v", value)
	return text[:min(len(text), 120)]
}
