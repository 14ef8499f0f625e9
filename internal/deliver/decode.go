package deliver

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// assembly puts a bundle together from its ConfigurationBundles, in the order of the group.
type assembly struct {
	items []bundle.Item
	// stream holds the documents of the last item of items, which are parsed when the next item begins.
	stream []byte
	total  int
}

// add takes the next ConfigurationBundle, which item of the group points at. It trusts nothing in it before the hash was checked.
func (a *assembly) add(item libv1beta1.ConfigurationItem, obj *libv1beta1.ConfigurationBundle) error {
	if obj.Annotations[annotationItem] == "" {
		return a.addResources(item, obj)
	}
	stream, err := decompress(obj.Spec.Payload)
	if err != nil {
		return err
	}
	text := obj.Annotations[annotationItem]
	if !hashMatches(item, canonical(text, stream)) {
		return fmt.Errorf("%w: its hash is not the one in the group", ErrCorrupt)
	}
	var head header
	if err := json.Unmarshal([]byte(text), &head); err != nil {
		return fmt.Errorf("%w: parse annotation %s: %w", ErrCorrupt, annotationItem, err)
	}
	if err := a.grow(len(stream)); err != nil {
		return err
	}
	switch {
	case head.Continues == "":
		if err := a.finish(); err != nil {
			return err
		}
		a.items = append(a.items, head.Item)
		a.stream = stream
		return nil
	case len(a.items) == 0:
		return fmt.Errorf("%w: it continues nothing", ErrCorrupt)
	case head.Continues == continuesDocument:
		a.stream = append(a.stream, stream...)
		return nil
	case head.Continues == continuesItem:
		a.stream = append(append(a.stream, separator...), stream...)
		return nil
	default:
		return fmt.Errorf("%w: it continues by %q", ErrCorrupt, head.Continues)
	}
}

// addResources takes a bundle that another hub wrote: an item of its own, with plain documents.
func (a *assembly) addResources(item libv1beta1.ConfigurationItem, obj *libv1beta1.ConfigurationBundle) error {
	if len(obj.Spec.Payload) > 0 || obj.Spec.NotTracked || obj.Spec.HelmReleaseUninstall {
		return fmt.Errorf("%w: it asks for what this agent does not know", ErrUnsupported)
	}
	if err := a.finish(); err != nil {
		return err
	}
	var objects []*unstructured.Unstructured
	for _, doc := range obj.Spec.Resources {
		if err := a.grow(len(doc)); err != nil {
			return err
		}
		var err error
		if objects, err = parseDocument(objects, []byte(doc)); err != nil {
			return err
		}
	}
	if len(item.Hash) > 0 && !resourcesMatch(item.Hash, objects) {
		return fmt.Errorf("%w: its hash is not the one in the group", ErrCorrupt)
	}
	a.items = append(a.items, itemFromSpec(obj.Spec, objects))
	return nil
}

// itemFromSpec returns the item that the fields of the Sveltos surface describe. Since it may hold anything, it is sensitive.
func itemFromSpec(spec libv1beta1.ConfigurationBundleSpec, objects []*unstructured.Unstructured) bundle.Item {
	item := bundle.Item{
		Objects: objects,
		Reference: bundle.Reference{
			Kind: spec.ReferencedObjectKind, Namespace: spec.ReferencedObjectNamespace, Name: spec.ReferencedObjectName, Tier: spec.ReferenceTier,
		},
		Sensitive:             true,
		SkipNamespaceCreation: spec.SkipNamespaceCreation,
		Force:                 spec.Force,
	}
	if spec.HelmReleaseName != "" {
		item.Release = &bundle.Release{
			Name: spec.HelmReleaseName, Namespace: spec.HelmReleaseNamespace, RepoURL: spec.HelmRepoURL,
			ChartVersion: spec.HelmChartVersion, Icon: spec.HelmIcon,
		}
	}
	return item
}

// resourcesMatch says whether hash is the SHA-256 over the JSON of all objects in order, with or without a newline after each:
// both are JSON forms that the object library writes.
func resourcesMatch(hash []byte, objects []*unstructured.Unstructured) bool {
	lines, plain := sha256.New(), sha256.New()
	for _, obj := range objects {
		raw, err := obj.MarshalJSON()
		if err != nil {
			return false
		}
		_, _ = lines.Write(raw)
		_, _ = plain.Write(bytes.TrimSuffix(raw, []byte("\n")))
	}
	return bytes.Equal(hash, lines.Sum(nil)) || bytes.Equal(hash, plain.Sum(nil))
}

func (a *assembly) grow(n int) error {
	a.total += n
	if a.total > maxContent {
		return fmt.Errorf("%w: it is larger than %d bytes", ErrCorrupt, maxContent)
	}
	return nil
}

// finish parses what was collected for the last item.
func (a *assembly) finish() error {
	if len(a.stream) == 0 {
		return nil
	}
	last := &a.items[len(a.items)-1]
	objects, err := parseStream(takeReleaseData(last, a.stream))
	if err != nil {
		return err
	}
	isNil := last.Objects == nil
	last.Objects = append(last.Objects, objects...)
	a.stream = nil
	if isNil && len(last.Objects) == 0 {
		last.Objects = nil
	}
	return nil
}

// bundle returns what was put together for group.
func (a *assembly) bundle(group *libv1beta1.ConfigurationGroup) (bundle.Bundle, error) {
	if err := a.finish(); err != nil {
		return bundle.Bundle{}, err
	}
	if !ours(group) {
		return foreignBundle(group, a.items), nil
	}
	var b bundle.Bundle
	if err := json.Unmarshal([]byte(group.Annotations[annotationBundle]), &b); err != nil {
		return bundle.Bundle{}, fmt.Errorf("%w: parse annotation %s: %w", ErrCorrupt, annotationBundle, err)
	}
	if len(a.items) > 0 {
		b.Items = a.items
	}
	digest, err := b.Digest()
	if err != nil {
		return bundle.Bundle{}, err
	}
	if want := bundle.DigestFromBytes(group.Spec.RequestorHash); digest != want {
		return bundle.Bundle{}, fmt.Errorf("%w: it is %s, want %s", ErrCorrupt, digest, want)
	}
	b.Hub = group.Annotations[kube.AnnotationHub]
	return b, nil
}

// foreignBundle returns the bundle of a group that another hub wrote. That hub does not name the profile; the requestor stands in for it.
func foreignBundle(group *libv1beta1.ConfigurationGroup, items []bundle.Item) bundle.Bundle {
	id, _ := IDOf(group)
	return bundle.Bundle{
		ID:    id,
		Owner: bundle.Owner{Kind: id.RequestorKind, Name: id.RequestorName, Tier: group.Spec.Tier},
		Items: slices.Clip(items),
		Options: bundle.Options{
			ContinueOnConflict: group.Spec.ContinueOnConflict,
			ContinueOnError:    group.Spec.ContinueOnError,
			Heal:               group.Spec.DriftDetection,
		},
	}
}
