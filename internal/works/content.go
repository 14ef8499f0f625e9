package works

import (
	"cmp"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// feature is the feature of each Work's bundle.
const feature = workv1alpha1.WorkKind

// BundleID returns the ID of the bundle of a Work.
func BundleID(work *workv1alpha1.Work) bundle.ID {
	return bundle.ID{RequestorKind: workv1alpha1.WorkKind, RequestorName: work.Name, Feature: feature}
}

// Bundle returns the desired state of a Work on its cluster: the manifests without server-set fields, with the
// ownership labels and annotations of the Work. Existing unmanaged objects stay unchanged, unless the conflict
// resolution annotation of the manifest or the Work is "overwrite". An invalid or duplicate manifest becomes an item
// with a DecodeError, and does not block the others.
func Bundle(work *workv1alpha1.Work) bundle.Bundle {
	b := bundle.Bundle{
		ID:      BundleID(work),
		Owner:   bundle.Owner{Kind: workv1alpha1.WorkKind, Name: work.Namespace + "/" + work.Name, Tier: bundle.DefaultTier},
		Options: bundle.Options{ContinueOnConflict: true, ContinueOnError: true, CorrectDrift: true, RejectUnmanaged: true},
	}
	ordinals := map[kube.Ref]int{}
	for i, manifest := range work.Spec.Workload.Manifests {
		obj, err := decodeManifest(manifest)
		if err == nil {
			key := kube.RefOf(obj).Key()
			if first, ok := ordinals[key]; ok {
				err = fmt.Errorf("%s is a duplicate of manifest %d", kube.RefOf(obj), first)
			} else {
				ordinals[key] = i
			}
		}
		if err != nil {
			b.Items = append(b.Items, bundle.Item{DecodeError: fmt.Sprintf("manifest %d: %v", i, err)})
			continue
		}
		removeServerFields(obj)
		policy := cmp.Or(obj.GetAnnotations()[workv1alpha1.ConflictResolutionAnnotation], work.Annotations[workv1alpha1.ConflictResolutionAnnotation])
		setOwnership(obj, work)
		b.Items = append(b.Items, bundle.Item{
			Objects: []*unstructured.Unstructured{obj}, Overwrite: policy == workv1alpha1.ConflictOverwrite,
			Sensitive: obj.GetKind() == "Secret" && obj.GroupVersionKind().Group == "",
		})
	}
	return b
}

// decodeManifest decodes one manifest. It fails without kind, apiVersion or name, or if labels or annotations have
// other values than strings.
func decodeManifest(manifest workv1alpha1.Manifest) (*unstructured.Unstructured, error) {
	obj := &unstructured.Unstructured{}
	if err := utiljson.Unmarshal(manifest.Raw, &obj.Object); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	switch ref := kube.RefOf(obj); {
	case ref.Kind == "" || ref.Version == "":
		return nil, errors.New("kind or apiVersion is missing")
	case ref.Name == "":
		return nil, errors.New("metadata.name is missing")
	}
	for _, field := range []string{"labels", "annotations"} {
		if _, _, err := unstructured.NestedStringMap(obj.Object, "metadata", field); err != nil {
			return nil, fmt.Errorf("metadata.%s: not all values are strings", field)
		}
	}
	return obj, nil
}

// setOwnership sets the labels and annotations that refer from an object to its Work.
func setOwnership(obj *unstructured.Unstructured, work *workv1alpha1.Work) {
	labels := obj.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	labels[workv1alpha1.ManagedLabel] = "true"
	labels[workv1alpha1.PermanentIDLabel] = cmp.Or(work.Labels[workv1alpha1.PermanentIDLabel], string(work.UID))
	obj.SetLabels(labels)
	annotations := obj.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[workv1alpha1.WorkNameAnnotation] = work.Name
	annotations[workv1alpha1.WorkNamespaceAnnotation] = work.Namespace
	obj.SetAnnotations(annotations)
}
