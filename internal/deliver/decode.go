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

// decoder decodes a bundle from its ConfigurationBundles, in the order of the group.
type decoder struct {
	items []bundle.Item
	// stream has the unparsed documents of the last item in items.
	stream []byte
	// total is the size of all documents in bytes.
	total int
}

// add decodes obj, the ConfigurationBundle to which the group's next item (reference) refers. It decompresses the
// payload, within limits, and verifies the hash before it uses anything else. key is the key with which
// obj was decrypted, nil if it was not encrypted.
func (d *decoder) add(reference libv1beta1.ConfigurationItem, obj *libv1beta1.ConfigurationBundle, key *contentKey) error {
	headerText := obj.Annotations[annotationHeader]
	if headerText == "" {
		return d.addResources(reference, obj)
	}
	stream, err := decompress(obj.Spec.Payload)
	if err != nil {
		return err
	}
	if !hashMatches(reference, canonicalContent(headerText, stream), key) {
		return fmt.Errorf("%w: its hash is not the one in the group", ErrCorrupt)
	}
	var head header
	if err := json.Unmarshal([]byte(headerText), &head); err != nil {
		return fmt.Errorf("%w: parse annotation %s: %w", ErrCorrupt, annotationHeader, err)
	}
	if err := d.addSize(len(stream)); err != nil {
		return err
	}
	switch {
	case head.Continues == "":
		if err := d.finishItem(); err != nil {
			return err
		}
		d.items = append(d.items, head.Item)
		d.stream = stream
		return nil
	case len(d.items) == 0:
		return fmt.Errorf("%w: the first chunk continues another chunk", ErrCorrupt)
	case head.Continues == continuesDocument:
		d.stream = append(d.stream, stream...)
		return nil
	case head.Continues == continuesItem:
		d.stream = append(append(d.stream, separator...), stream...)
		return nil
	default:
		return fmt.Errorf("%w: unknown continuation %q", ErrCorrupt, head.Continues)
	}
}

// addResources adds a ConfigurationBundle of a Sveltos hub as one item. Its documents are in spec.resources. The group
// may have no hash of it.
func (d *decoder) addResources(reference libv1beta1.ConfigurationItem, obj *libv1beta1.ConfigurationBundle) error {
	if len(obj.Spec.Payload) > 0 || obj.Spec.NotTracked || obj.Spec.HelmReleaseUninstall {
		return fmt.Errorf("%w: it has options that this agent does not know", ErrUnsupported)
	}
	if err := d.finishItem(); err != nil {
		return err
	}
	var objects []*unstructured.Unstructured
	for _, doc := range obj.Spec.Resources {
		if err := d.addSize(len(doc)); err != nil {
			return err
		}
		var err error
		if objects, err = parseDocument(objects, []byte(doc)); err != nil {
			return err
		}
	}
	if len(reference.Hash) > 0 && !resourcesMatch(reference.Hash, objects) {
		return fmt.Errorf("%w: its hash is not the one in the group", ErrCorrupt)
	}
	d.items = append(d.items, itemFromSpec(obj.Spec, objects))
	return nil
}

// itemFromSpec returns the item of a spec that a Sveltos hub wrote. It is sensitive, since it may have Secrets.
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

// resourcesMatch returns whether hash is the SHA-256 of the JSON of all objects in order, with or without a newline
// after each: MarshalJSON of unstructured objects adds the newline and json.Marshal removes it, and Sveltos hubs hash
// either.
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

// addSize adds to the size of the documents. It fails if they are too large.
func (d *decoder) addSize(n int) error {
	d.total += n
	if d.total > maxContent {
		return fmt.Errorf("%w: it is larger than %d bytes", ErrCorrupt, maxContent)
	}
	return nil
}

// finishItem parses the documents of the last item. It is called when the next item begins, and at the end.
func (d *decoder) finishItem() error {
	if len(d.stream) == 0 {
		return nil
	}
	last := &d.items[len(d.items)-1]
	objects, err := parseStream(takeReleaseData(last, d.stream))
	if err != nil {
		return err
	}
	last.Objects = append(last.Objects, objects...)
	d.stream = nil
	return nil
}

// result returns the decoded bundle of group.
func (d *decoder) result(group *libv1beta1.ConfigurationGroup) (bundle.Bundle, error) {
	if err := d.finishItem(); err != nil {
		return bundle.Bundle{}, err
	}
	if !isFromTowline(group) {
		return bundleFromSveltos(group, d.items), nil
	}
	var outline bundleOutline
	if err := json.Unmarshal([]byte(group.Annotations[annotationOutline]), &outline); err != nil {
		return bundle.Bundle{}, fmt.Errorf("%w: parse annotation %s: %w", ErrCorrupt, annotationOutline, err)
	}
	b := outline.Bundle
	if len(d.items) > 0 { // otherwise Items of the outline is right: nil or an empty list, with different digests
		b.Items = d.items
	}
	digest, err := b.Digest()
	if err != nil {
		return bundle.Bundle{}, err
	}
	if want := bundle.DigestFromBytes(group.Spec.RequestorHash); digest != want {
		return bundle.Bundle{}, fmt.Errorf("%w: its digest is %s, want %s", ErrCorrupt, digest, want)
	}
	b.Hub = group.Annotations[kube.AnnotationHub]
	setUnconfirmed(b, outline.Releases)
	return b, nil
}

// setUnconfirmed sets Release.IsUnconfirmed, which the content lacks, from the releases of the outline.
func setUnconfirmed(b bundle.Bundle, listed []bundle.DeployedRelease) {
	for _, item := range b.Items {
		if release := item.Release; release != nil {
			release.IsUnconfirmed = slices.ContainsFunc(listed, func(d bundle.DeployedRelease) bool {
				return d.Namespace == release.Namespace && d.Name == release.Name && d.IsUnconfirmed
			})
		}
	}
}

// bundleFromSveltos returns the bundle of a group that a Sveltos hub wrote. Its owner is the requestor, since the group
// does not name the profile.
func bundleFromSveltos(group *libv1beta1.ConfigurationGroup, items []bundle.Item) bundle.Bundle {
	id, _ := IDOf(group)
	return bundle.Bundle{
		ID:    id,
		Owner: bundle.Owner{Kind: id.RequestorKind, Name: id.RequestorName, Tier: group.Spec.Tier},
		Items: slices.Clip(items),
		Options: bundle.Options{
			ContinueOnConflict: group.Spec.ContinueOnConflict,
			ContinueOnError:    group.Spec.ContinueOnError,
			CorrectDrift:       group.Spec.DriftDetection,
			DriftExclusions:    group.Spec.DriftExclusions,
			ServiceAccount:     serviceAccountOf(group),
		},
	}
}
