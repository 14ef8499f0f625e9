package release

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// annotationRendering on the Secret of a record holds the Rendering of the revision. If the inventory of a member is
// lost, the hub renders the release with it again, so that the lost inventory causes no new revision.
const annotationRendering = "towline.dev/rendering"

// Rendering has the fields of bundle.Release that the templates of a revision read. The revision of a record may be
// higher: an attempt after a failure is a new revision, and renders nothing.
type Rendering struct {
	Inputs    string
	Revision  int
	IsUpgrade bool
}

// AnnotateRendering adds a Rendering to the annotations for the Secret of a record.
func AnnotateRendering(annotations map[string]string, r Rendering) {
	annotations[annotationRendering] = fmt.Sprintf("%s %d %t", r.Inputs, r.Revision, r.IsUpgrade)
}

// RenderingOf returns the Rendering in the annotations of the Secret of a record. ok is false if there is none.
func RenderingOf(secret metav1.ObjectMeta) (r Rendering, ok bool) {
	_, err := fmt.Sscanf(secret.Annotations[annotationRendering], "%s %d %t", &r.Inputs, &r.Revision, &r.IsUpgrade)
	return r, err == nil && r.Revision > 0
}
