package release

import (
	"fmt"

	"helm.sh/helm/v4/pkg/release/common"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// annotationRendering on the Secret of a record holds the Rendering of the revision. After the inventory of a member is
// lost, the hub renders the release with it again, so that the loss causes no new revision.
const annotationRendering = "towline.dev/rendering"

// Rendering has the fields of bundle.Release that the templates of a revision read. Its Revision can be lower than the
// revision of the record: another attempt after a failure is a new revision, but is not rendered again.
type Rendering struct {
	Inputs    string
	Revision  int
	IsUpgrade bool
}

// NextRendering returns the Rendering of the revision after entries, which are sorted. Helm or another profile may have
// written them. If the same bundle wrote the last record, for the same inputs, nothing has changed, and the Rendering
// of that record is returned. isOwn returns whether the bundle wrote a record.
func NextRendering(entries []Entry, inputs string, isOwn func(secret metav1.ObjectMeta) bool) Rendering {
	next := Rendering{Inputs: inputs, Revision: 1}
	for _, entry := range entries {
		next.Revision = entry.Revision + 1
		next.IsUpgrade = next.IsUpgrade || entry.Status == common.StatusDeployed
	}
	if len(entries) > 0 {
		last := entries[len(entries)-1].Secret
		if former, ok := RenderingOf(last); ok && former.Inputs == inputs && isOwn(last) {
			return former
		}
	}
	return next
}

// AnnotateRendering adds r to annotations, which are for the Secret of a record.
func AnnotateRendering(annotations map[string]string, r Rendering) {
	annotations[annotationRendering] = fmt.Sprintf("%s %d %t", r.Inputs, r.Revision, r.IsUpgrade)
}

// RenderingOf returns the Rendering in the annotations of the Secret of a record. ok is false if there is none.
func RenderingOf(secret metav1.ObjectMeta) (r Rendering, ok bool) {
	_, err := fmt.Sscanf(secret.Annotations[annotationRendering], "%s %d %t", &r.Inputs, &r.Revision, &r.IsUpgrade)
	return r, err == nil && r.Revision > 0
}
