package fleet

import (
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/kube"
)

// RemoveDeregistration removes the annotations and the option that the hub itself writes during a deregistration, and
// returns true if there were any. On a cluster that is not being deleted they come from a backup, and a later
// deregistration would skip its first steps. The options of the user stay.
func RemoveDeregistration(cluster metav1.Object) bool {
	annotations := maps.Clone(cluster.GetAnnotations())
	for _, key := range []string{kube.AnnotationAgentOrder, kube.AnnotationDeadline, kube.AnnotationLeftBehind} {
		delete(annotations, key)
	}
	options := strings.Split(annotations[kube.AnnotationDeregister], ",")
	if slices.Contains(options, kube.DeregisterAbandon) {
		options = slices.DeleteFunc(options, func(option string) bool { return option == kube.DeregisterAbandon })
		annotations[kube.AnnotationDeregister] = strings.Join(options, ",")
		if len(options) == 0 {
			delete(annotations, kube.AnnotationDeregister)
		}
	}
	if maps.Equal(annotations, cluster.GetAnnotations()) {
		return false
	}
	cluster.SetAnnotations(annotations)
	return true
}
