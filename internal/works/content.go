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

// feature is the one feature of a Work.
const feature = workv1alpha1.WorkKind

// Requestor names the bundle of a Work.
func Requestor(work *workv1alpha1.Work) bundle.ID {
	return bundle.ID{RequestorKind: workv1alpha1.WorkKind, RequestorName: work.Name, Feature: feature}
}

// Bundle returns what a Work wants on its cluster: its manifests, without what only a server sets, with the marks of the Work on them. What is
// there already and is not managed is left alone, unless the manifest, or the Work for all of them, says overwrite. A manifest that cannot be
// read is a problem of the bundle, which keeps no other from the cluster.
func Bundle(work *workv1alpha1.Work) bundle.Bundle {
	b := bundle.Bundle{
		ID:      Requestor(work),
		Owner:   bundle.Owner{Kind: workv1alpha1.WorkKind, Name: work.Namespace + "/" + work.Name, Tier: bundle.DefaultTier},
		Options: bundle.Options{ContinueOnConflict: true, ContinueOnError: true, CorrectDrift: true, RejectUnmanaged: true},
	}
	ordinals := map[kube.Ref]int{}
	for i, manifest := range work.Spec.Workload.Manifests {
		obj, err := read(manifest)
		if err == nil {
			key := kube.RefOf(obj).Key()
			if first, ok := ordinals[key]; ok {
				err = fmt.Errorf("%s is there already, as manifest %d", kube.RefOf(obj), first)
			} else {
				ordinals[key] = i
			}
		}
		if err != nil {
			b.Items = append(b.Items, bundle.Item{DecodeError: fmt.Sprintf("manifest %d: %v", i, err)})
			continue
		}
		prune(obj)
		policy := cmp.Or(obj.GetAnnotations()[workv1alpha1.ConflictResolutionAnnotation], work.Annotations[workv1alpha1.ConflictResolutionAnnotation])
		mark(obj, work)
		b.Items = append(b.Items, bundle.Item{
			Objects: []*unstructured.Unstructured{obj}, Overwrite: policy == workv1alpha1.ConflictOverwrite,
			Sensitive: obj.GetKind() == "Secret" && obj.GroupVersionKind().Group == "",
		})
	}
	return b
}

// read decodes one manifest.
func read(manifest workv1alpha1.Manifest) (*unstructured.Unstructured, error) {
	obj := &unstructured.Unstructured{}
	if err := utiljson.Unmarshal(manifest.Raw, &obj.Object); err != nil {
		return nil, fmt.Errorf("decode it: %w", err)
	}
	switch ref := kube.RefOf(obj); {
	case ref.Kind == "" || ref.Version == "":
		return nil, errors.New("it has no kind or no apiVersion")
	case ref.Name == "":
		return nil, errors.New("it has no name")
	}
	for _, field := range []string{"labels", "annotations"} {
		if _, _, err := unstructured.NestedStringMap(obj.Object, "metadata", field); err != nil {
			return nil, fmt.Errorf("metadata.%s: they are not all strings", field)
		}
	}
	return obj, nil
}

// mark says on an object which Work it is of.
func mark(obj *unstructured.Unstructured, work *workv1alpha1.Work) {
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
