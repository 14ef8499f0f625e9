package engine_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/release"
)

// TestReleaseRecordHasItsRendering deploys a release whose templates read the revision.
func TestReleaseRecordHasItsRendering(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.chart(bundle.ReleaseOptions{}, c.configMap("main", "1"))
	b.Items[0].Release.Inputs, b.Items[0].Release.Revision, b.Items[0].Release.IsUpgrade = "inputs", 4, true
	deploy(t, c.engine(nil), b)
	record, err := c.objects.Resource(secrets).Namespace(c.ns).Get(t.Context(), release.SecretName("web", 1), metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got, _ := release.RenderingOf(metav1.ObjectMeta{Annotations: record.GetAnnotations()})
	if diff := cmp.Diff(release.Rendering{Inputs: "inputs", Revision: 4, IsUpgrade: true}, got); diff != "" {
		t.Errorf("the rendering differs (-want +got):\n%s", diff)
	}
}
