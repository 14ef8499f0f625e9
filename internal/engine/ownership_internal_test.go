package engine

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// TestLargeMetadataIsNotKept reads objects with more metadata than a run may keep in memory.
func TestLargeMetadataIsNotKept(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("x", 200<<10)
	many := map[string]string{}
	for i := range 10_000 {
		many[fmt.Sprintf("%s/%d", workv1alpha1.GroupName, i)] = "x"
	}
	for name, marked := range map[string]map[string]string{
		"others":         {"example.com/a": large},
		"long values":    {kube.AnnotationRequestor: large, kube.AnnotationOwnerName: large, workv1alpha1.WorkNameAnnotation: large},
		"many of a Work": many,
	} {
		existing := liveOf(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Labels: marked, Annotations: marked}})
		size := 0
		for _, kept := range []map[string]string{existing.Labels, existing.Annotations} {
			for key, value := range kept {
				size += len(key) + len(value)
			}
		}
		if size > 2*maxOwnershipSize {
			t.Errorf("%s: %d bytes are kept", name, size)
		}
	}
}

// TestUsedLabelsAndAnnotationsAreKept checks that a run keeps the labels and annotations that the engine uses, also if
// a value is a long URL.
func TestUsedLabelsAndAnnotationsAreKept(t *testing.T) {
	t.Parallel()
	labels := map[string]string{kube.LabelReason: "Helm", workv1alpha1.ManagedLabel: "true", workv1alpha1.PermanentIDLabel: "id"}
	annotations := map[string]string{
		kube.AnnotationDriftIgnore: "", kube.AnnotationKeep: "keep", annotationReleaseName: "web", annotationReleaseNamespace: "site",
		annotationRevisionDigest: "digest", workv1alpha1.WorkNameAnnotation: "work", workv1alpha1.WorkNamespaceAnnotation: "karmada-es-eu",
		workv1alpha1.ConflictResolutionAnnotation: "overwrite",
	}
	for _, name := range ownershipAnnotations() {
		annotations[name] = name
	}
	annotations[kube.AnnotationReferenceName] = "https://example.com/" + strings.Repeat("x", 4<<10)
	meta := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"note": "x"}}}
	for name, value := range labels {
		meta.Labels[name] = value
	}
	for name, value := range annotations {
		meta.Annotations[name] = value
	}
	existing := liveOf(meta)
	if diff := cmp.Diff(labels, existing.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(annotations, existing.Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
}
