package engine

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// defaultNamespace is the namespace of namespaced objects that name no namespace and belong to no release.
const defaultNamespace = "default"

// target is one object of a bundle, ready to be compared with the cluster and applied.
type target struct {
	ref       kube.Ref
	rank      int
	ownership ownership
	// item is the index of the item in a bundle with Helm releases, 0 in other bundles. release is the release of the item
	// as namespace/name, "" if it has none.
	item    int
	release string
	// origin is inventory.Entry.Origin.
	origin string
	// content is the rendered object with its namespace, without the fields that only a server sets, and without
	// ownership labels.
	content map[string]any
	// resource is zero while neither the server nor a definition in the bundle knows the kind.
	resource kube.Resource
	// served is the resource with which the object can be read now. Its version may differ from the object's. It is zero
	// if the kind is not served, so that the object cannot exist yet.
	served kube.Resource

	skipNamespaceCreation bool
	force                 bool
	rejectUnmanaged       bool // do not change an existing object that is not managed
	overwrite             bool // change this object even if rejectUnmanaged is true
	createOnly            bool // do not change an existing object, see isLeftAlone
	// subresources are applied after the object.
	subresources []string
	// excluded are the fields that are applied only to a new object.
	excluded []jsonPath
}

func (t *target) key() kube.Ref { return t.ref.Key() }

func (t *target) isCRD() bool { return t.rank == rankCRD }

// kinds has the resources of a bundle's kinds on the cluster: exact has the resource in the requested version, any the
// resource in that or another served version.
type kinds struct {
	exact map[schema.GroupVersionKind]kube.Resource
	any   map[schema.GroupVersionKind]kube.Resource
}

// planTargets lists the targets of b in the order in which they are applied. It fails with the first invalid object,
// unless b has RejectUnmanaged: b then belongs to a Work, in which an invalid manifest must not block the others, so
// each invalid object is a problem. An item that could not be decoded is a problem in both cases.
func planTargets(b bundle.Bundle, known kinds) (targets []*target, problems applyErrors, err error) {
	exclusions, err := parseExclusions(b.Options.DriftExclusions)
	if err != nil {
		return nil, nil, &invalidBundleError{err}
	}
	defined := definedKinds(b)
	firstItem := map[kube.Ref]bundle.Item{}
	tolerate := func(err error) error {
		err = &invalidBundleError{err}
		if !b.Options.RejectUnmanaged {
			return err
		}
		problems = append(problems, err)
		return nil
	}
	hasReleases := slices.ContainsFunc(b.Items, func(item bundle.Item) bool { return item.Release != nil })
	for i, item := range b.Items {
		if item.DecodeError != "" {
			problems = append(problems, &invalidBundleError{errors.New(item.DecodeError)})
		}
		for n, obj := range item.Objects {
			if item.Release != nil && bundle.IsHook(obj) {
				continue
			}
			t, err := newTarget(obj, item, b)
			if err != nil {
				if err := tolerate(err); err != nil {
					return nil, nil, err
				}
				continue
			}
			if hasReleases {
				t.item = i // the items are applied one after the other
			}
			t.createOnly = isCreateOnly(item, n)
			gvk := t.ref.GVK()
			t.served = known.any[gvk]
			t.resource = cmp.Or(known.exact[gvk], defined[gvk])
			setNamespace(t, item)
			t.excluded = excludedPaths(exclusions, t.ref, t.content)
			if first, ok := firstItem[t.key()]; ok {
				err := fmt.Errorf("%s is listed twice: in %s and in %s", t.ref, describeItem(first), describeItem(item))
				if err := tolerate(err); err != nil {
					return nil, nil, err
				}
				continue
			}
			firstItem[t.key()] = item
			if err := setMarks(t, item, b); err != nil {
				if err := tolerate(err); err != nil {
					return nil, nil, err
				}
				continue
			}
			targets = append(targets, t)
		}
	}
	slices.SortStableFunc(targets, func(a, b *target) int { return cmp.Or(cmp.Compare(a.item, b.item), cmp.Compare(a.rank, b.rank)) })
	return targets, problems, nil
}

// newTarget returns the target of an object. It copies the fields that it changes, since the bundle is shared.
func newTarget(obj *unstructured.Unstructured, item bundle.Item, b bundle.Bundle) (*target, error) {
	ref := kube.RefOf(obj)
	switch {
	case ref.Kind == "" || ref.Version == "":
		return nil, fmt.Errorf("an object in %s has no kind or no apiVersion", describeItem(item))
	case ref.Name == "":
		return nil, fmt.Errorf("a %s in %s has no name", ref.Kind, describeItem(item))
	}
	content := maps.Clone(obj.Object)
	metadata, ok := content["metadata"].(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%s of bundle %s has no metadata", ref, b.ID)
	}
	metadata = maps.Clone(metadata)
	for _, field := range []string{"managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink", "deletionTimestamp"} {
		delete(metadata, field)
	}
	content["metadata"] = metadata
	releaseName := ""
	if item.Release != nil {
		releaseName = releaseKey(item).String()
		setHelmMetadata(metadata, item.Release)
	}
	if ref.Group == "" && ref.Kind == "Secret" {
		if err := convertStringData(content); err != nil {
			return nil, fmt.Errorf("%s: %w", ref, err)
		}
	}
	if _, ok := content["aggregationRule"]; ok && ref.Group == groupRBAC && ref.Kind == "ClusterRole" {
		// A controller of the cluster writes the rules of an aggregated role, and would overwrite ours again and again.
		delete(content, "rules")
	}
	force := item.Force || obj.GetAnnotations()[kube.AnnotationForceRecreate] == "true"
	return &target{
		ref: ref, rank: rankOf(ref.GVK().GroupKind()), content: content, release: releaseName, origin: originOf(item),
		skipNamespaceCreation: item.SkipNamespaceCreation, force: force,
		rejectUnmanaged: b.Options.RejectUnmanaged, overwrite: item.Overwrite, subresources: item.Subresources,
	}, nil
}

// isCreateOnly returns whether object n of an item may be created, but not changed: Helm leaves CRDs of a crds
// directory alone once they exist.
func isCreateOnly(item bundle.Item, n int) bool {
	return item.Release != nil && !item.Release.Options.UpgradeCRDs && release.IsFromCRDFile(item, n)
}

// setHelmMetadata sets the label and the annotations by which Helm knows the objects of a release.
func setHelmMetadata(metadata map[string]any, release *bundle.Release) {
	labels, annotations := maps.Clone(mapOf(metadata["labels"])), maps.Clone(mapOf(metadata["annotations"]))
	labels[labelManagedBy] = managedByHelm
	annotations[annotationReleaseName], annotations[annotationReleaseNamespace] = release.Name, release.Namespace
	metadata["labels"], metadata["annotations"] = labels, annotations
}

// convertStringData converts a Secret's stringData to data, as the API server does when it stores the Secret. The
// server records no field managers for stringData, so drift of it would not be noticed. The server treats null as an
// empty map, and a null value as an empty string.
func convertStringData(content map[string]any) error {
	written, found := content["stringData"]
	if !found {
		return nil
	}
	plain, ok := written.(map[string]any)
	if !ok && written != nil {
		return errors.New("stringData is not a map")
	}
	data, ok := content["data"].(map[string]any)
	if !ok {
		data = map[string]any{}
	}
	data = maps.Clone(data)
	for name, value := range plain {
		text, ok := value.(string)
		if !ok && value != nil {
			return fmt.Errorf("stringData.%s is not a string", name)
		}
		data[name] = base64.StdEncoding.EncodeToString([]byte(text))
	}
	if len(plain) > 0 {
		content["data"] = data
	}
	delete(content, "stringData")
	return nil
}

// setNamespace sets the namespace of a namespaced target, and deletes the namespace of a cluster-scoped one. It changes
// nothing if the kind is unknown.
func setNamespace(t *target, item bundle.Item) {
	resource := t.resource
	if resource == (kube.Resource{}) {
		return
	}
	metadata := t.content["metadata"].(map[string]any)
	if !resource.Namespaced {
		t.ref.Namespace = ""
		delete(metadata, "namespace")
		return
	}
	if t.ref.Namespace == "" {
		t.ref.Namespace = defaultNamespace
		if item.Release != nil && item.Release.Namespace != "" {
			t.ref.Namespace = item.Release.Namespace
		}
		metadata["namespace"] = t.ref.Namespace
	}
}

// setMarks sets the ownership labels and annotations of a target, with the digest of its content. It also excludes the
// replicas if the cluster decides about them.
func setMarks(t *target, item bundle.Item, b bundle.Bundle) error {
	digest, err := t.digest()
	if err != nil {
		return fmt.Errorf("encode %s: %w", t.ref, err)
	}
	if t.hasRetainedReplicas() {
		t.excluded = append(t.excluded, jsonPath{"spec", "replicas"})
	}
	t.ownership = ownershipOf(b, item, digest)
	return nil
}

// digest returns the digest of the content of a target, its excluded fields and its subresources. After a change of one
// of them the object is applied again.
func (t *target) digest() (string, error) {
	raw, err := json.Marshal(t.content)
	if err != nil {
		return "", err
	}
	if len(t.excluded)+len(t.subresources) > 0 {
		options, err := json.Marshal([]any{t.excluded, t.subresources})
		if err != nil {
			return "", err
		}
		raw = append(raw, options...)
	}
	sum := sha256.Sum256(raw)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

// body returns the body of an apply request: the content and the ownership labels. With a uid the request fails unless
// the object has this UID.
func (t *target) body(adopt bool, uid types.UID) map[string]any {
	body := maps.Clone(t.content)
	metadata := maps.Clone(body["metadata"].(map[string]any))
	labels := maps.Clone(mapOf(metadata["labels"]))
	labels[kube.LabelReason] = t.ownership.reason
	annotations := maps.Clone(mapOf(metadata["annotations"]))
	for name, value := range t.ownership.annotations {
		annotations[name] = value
	}
	delete(annotations, kube.AnnotationAdopted)
	if adopt {
		annotations[kube.AnnotationAdopted] = "true"
	}
	metadata["labels"], metadata["annotations"] = labels, annotations
	if uid != "" {
		metadata["uid"] = string(uid)
	}
	body["metadata"] = metadata
	return body
}

func encodeBody(ref kube.Ref, body map[string]any) ([]byte, error) {
	raw, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", ref, err)
	}
	return raw, nil
}

// mapOf returns value as a map, or an empty map if it is none.
func mapOf(value any) map[string]any {
	if m, ok := value.(map[string]any); ok && m != nil {
		return m
	}
	return map[string]any{}
}

// describeItem names the origin of an item in messages.
func describeItem(item bundle.Item) string {
	return cmp.Or(originOf(item), "the bundle")
}

// originOf names the release or the referenced object that an item comes from, "" if there is none.
func originOf(item bundle.Item) string {
	if item.Release != nil {
		return originOfRelease(releaseKey(item).String())
	}
	if ref := item.Reference; ref.Kind != "" {
		return ref.String()
	}
	return ""
}

func originOfRelease(key string) string { return "Helm release " + key }

// definedKinds lists the kinds that CustomResourceDefinitions of b define, in the versions that are served.
func definedKinds(b bundle.Bundle) map[schema.GroupVersionKind]kube.Resource {
	defined := map[schema.GroupVersionKind]kube.Resource{}
	for _, item := range b.Items {
		for _, obj := range item.Objects {
			if obj.GetKind() == "CustomResourceDefinition" && obj.GroupVersionKind().Group == groupAPIExtensions {
				addServedKinds(defined, obj.Object)
			}
		}
	}
	return defined
}

// addServedKinds adds the kinds of a CustomResourceDefinition to defined, in the versions that it serves.
func addServedKinds(defined map[schema.GroupVersionKind]kube.Resource, crd map[string]any) {
	text := func(path ...string) string {
		value, _, err := unstructured.NestedString(crd, path...)
		if err != nil {
			return ""
		}
		return value
	}
	group := text("spec", "group")
	versions, _, err := unstructured.NestedSlice(crd, "spec", "versions")
	if err != nil {
		return
	}
	for _, version := range versions {
		if served, ok := mapOf(version)["served"].(bool); ok && !served {
			continue
		}
		name, _ := mapOf(version)["name"].(string)
		gv := schema.GroupVersion{Group: group, Version: name}
		defined[gv.WithKind(text("spec", "names", "kind"))] = kube.Resource{
			GVR: gv.WithResource(text("spec", "names", "plural")), Namespaced: text("spec", "scope") == "Namespaced",
		}
	}
}

// errUnknownKind is the error of an object whose kind neither the server nor the bundle defines.
var errUnknownKind = errors.New("the cluster does not know this kind, and no CustomResourceDefinition of the bundle defines it")
