package hub

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
)

func TestCachedObjectsOmitUnreadFields(t *testing.T) {
	t.Parallel()
	newMeta := func() metav1.ObjectMeta {
		return metav1.ObjectMeta{
			Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "a": "b"}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}},
		}
	}
	// An update of a cluster must not delete the annotation that kubectl apply needs.
	both := map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "a": "b"}
	for name, test := range map[string]struct {
		transform func(any) (any, error)
		obj       client.Object
		want      map[string]string
	}{
		"metadata":       {prepareForCache, &metav1.PartialObjectMetadata{ObjectMeta: newMeta()}, map[string]string{"a": "b"}},
		"a cluster":      {prepareForCache, &libv1beta1.SveltosCluster{ObjectMeta: newMeta()}, both},
		"a summary":      {newSharedSpecs("").transform, &configv1beta1.ClusterSummary{ObjectMeta: newMeta()}, both},
		"a summary meta": {newSharedSpecs("").transform, &metav1.PartialObjectMetadata{ObjectMeta: newMeta()}, map[string]string{"a": "b"}},
	} {
		if _, err := test.transform(test.obj); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(test.want, test.obj.GetAnnotations()); diff != "" {
			t.Errorf("annotations of %s (-want +got):\n%s", name, diff)
		}
		if len(test.obj.GetManagedFields()) > 0 {
			t.Errorf("%s has managedFields", name)
		}
	}
}

// The agent of a Cluster in pull mode writes the statuses of objects, which have any size.
func TestCachedWorksOmitObjectStatuses(t *testing.T) {
	t.Parallel()
	work := &workv1alpha1.Work{Status: workv1alpha1.WorkStatus{
		Conditions: []metav1.Condition{{Type: workv1alpha1.WorkApplied}}, ManifestStatuses: make([]workv1alpha1.ManifestStatus, 10_000),
	}}
	cached, err := prepareForCache(work)
	if err != nil {
		t.Fatal(err)
	}
	if status := cached.(*workv1alpha1.Work).Status; status.ManifestStatuses != nil || len(status.Conditions) != 1 {
		t.Errorf("the cached status is %+v, want only the condition", status)
	}
}

func TestCachedSummariesShareTheSpecOfTheirProfile(t *testing.T) {
	t.Parallel()
	specs := newSharedSpecs("")
	isController := true
	cached := func(profile, content string) *configv1beta1.ClusterSummary {
		summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{UID: types.UID(profile), Controller: &isController}}}}
		summary.Spec.ClusterProfileSpec.PolicyRefs = []libv1beta1.PolicyRef{{Name: content}}
		if _, err := specs.transform(summary); err != nil {
			t.Fatal(err)
		}
		if got := summary.Spec.ClusterProfileSpec.PolicyRefs[0].Name; got != content {
			t.Errorf("the cached spec refers to %s, want %s", got, content)
		}
		return summary
	}
	share := func(a, b *configv1beta1.ClusterSummary) bool {
		return &a.Spec.ClusterProfileSpec.PolicyRefs[0] == &b.Spec.ClusterProfileSpec.PolicyRefs[0]
	}
	first, second, other := cached("p", "old"), cached("p", "old"), cached("q", "old")
	if !share(first, second) || share(first, other) {
		t.Errorf("equal specs of a profile share memory: %t; of two profiles: %t", share(first, second), share(first, other))
	}
	changed, again := cached("p", "new"), cached("p", "new")
	if share(first, changed) || !share(changed, again) {
		t.Errorf("a changed spec shares memory with the old one: %t, with its equals: %t", share(first, changed), share(changed, again))
	}
}
