package source

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/phase"
)

// subresourcesOf returns the subresources that the annotation of a ConfigMap or Secret lists.
func subresourcesOf(ref Reference, annotations map[string]string) ([]string, error) {
	var all []string
	for name := range strings.SplitSeq(annotations[libv1beta1.SubresourcesAnnotation], ",") {
		name = strings.TrimSpace(name)
		switch {
		case name == "" || slices.Contains(all, name):
		case len(validation.IsDNS1035Label(name)) > 0:
			return nil, phase.TerminalErrorf("%s: annotation %s: %q is not the name of a subresource", ref, libv1beta1.SubresourcesAnnotation, name)
		default:
			all = append(all, name)
		}
	}
	return all, nil
}
