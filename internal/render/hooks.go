package render

import (
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// hookAnnotation lists the moments at which Helm makes an object that is no lasting part of the release.
const hookAnnotation = "helm.sh/hook"

// split tells the objects that last from hooks. The chart's tests are neither: they are no part of an installation.
func split(objects []*unstructured.Unstructured) (lasting, hooks []*unstructured.Unstructured) {
	for _, object := range objects {
		moments, isHook := object.GetAnnotations()[hookAnnotation]
		switch {
		case !isHook:
			lasting = append(lasting, object)
		case !isTest(moments):
			hooks = append(hooks, object)
		}
	}
	return lasting, hooks
}

// refusal names hooks: to leave out what a chart counts on would be half an installation.
func refusal(hooks []*unstructured.Unstructured) error {
	var names []string
	for _, hook := range hooks {
		names = append(names, kube.RefOf(hook).String()+" ("+hook.GetAnnotations()[hookAnnotation]+")")
	}
	return phase.Invalidf("Helm hooks are not supported yet, and it has %s; options.disableHooks leaves them out", strings.Join(names, ", "))
}

// isTest says whether all moments of a hook are tests, which run only when somebody asks for them.
func isTest(hook string) bool {
	for moment := range strings.SplitSeq(hook, ",") {
		switch strings.ToLower(strings.TrimSpace(moment)) {
		case "test", "test-success", "test-failure":
		default:
			return false
		}
	}
	return true
}
