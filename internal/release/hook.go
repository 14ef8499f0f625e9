package release

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	helm "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
)

// Hook is a hook of a release with the values of its annotations (https://helm.sh/docs/topics/charts_hooks).
type Hook struct {
	Object *unstructured.Unstructured
	Path   string // of the template
	Events []helm.HookEvent
	Weight int
	// DeletePolicies is before-hook-creation if the hook has no policy, as in Helm.
	DeletePolicies []helm.HookDeletePolicy
}

// ParseHook reads the annotations of a hook.
func ParseHook(object *unstructured.Unstructured, path string) Hook {
	annotations := object.GetAnnotations()
	h := Hook{Object: object, Path: path}
	for _, event := range splitList(annotations[helm.HookAnnotation]) {
		if event == "test-success" {
			event = string(helm.HookTest) // the name of Helm 2
		}
		h.Events = append(h.Events, helm.HookEvent(event))
	}
	if weight, err := strconv.Atoi(annotations[helm.HookWeightAnnotation]); err == nil {
		h.Weight = weight
	}
	for _, policy := range splitList(annotations[helm.HookDeleteAnnotation]) {
		h.DeletePolicies = append(h.DeletePolicies, helm.HookDeletePolicy(policy))
	}
	if len(h.DeletePolicies) == 0 {
		h.DeletePolicies = []helm.HookDeletePolicy{helm.HookBeforeHookCreation}
	}
	return h
}

func splitList(text string) []string {
	var all []string
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.ToLower(strings.TrimSpace(part)); part != "" {
			all = append(all, part)
		}
	}
	return all
}

// minHookJobTTL is the smallest ttlSecondsAfterFinished that the Job of a hook keeps, in seconds. With a smaller value
// the Job could be deleted before the engine has read its result.
const minHookJobTTL = 24 * 3600

// hasShortTTL returns whether the hook is a Job with a ttlSecondsAfterFinished below minHookJobTTL.
func (h Hook) hasShortTTL() bool {
	seconds, ok, err := unstructured.NestedInt64(h.Object.Object, "spec", "ttlSecondsAfterFinished")
	return h.Object.GetKind() == "Job" && ok && err == nil && seconds < minHookJobTTL
}

// NewObject returns a copy of the object to create for the hook. It removes a short TTL from a Job: the caller deletes
// the Job after it has read the result, since IsDeletedOn returns true.
func (h Hook) NewObject() *unstructured.Unstructured {
	object := h.Object.DeepCopy()
	if h.hasShortTTL() {
		unstructured.RemoveNestedField(object.Object, "spec", "ttlSecondsAfterFinished")
	}
	return object
}

// IsDeletedOn returns whether the object of the hook is deleted at the event of policy. That is so if the hook has the
// policy, and for a Job with a short TTL after its end. A CustomResourceDefinition is never deleted, since that would
// delete all its custom resources.
func (h Hook) IsDeletedOn(policy helm.HookDeletePolicy) bool {
	if h.hasShortTTL() && policy != helm.HookBeforeHookCreation {
		return true
	}
	return h.Object.GetKind() != "CustomResourceDefinition" && slices.Contains(h.DeletePolicies, policy)
}

// ItemHooks returns the hooks of a Helm item.
func ItemHooks(item bundle.Item) []Hook {
	var hooks []Hook
	for i, object := range item.Objects {
		if bundle.IsHook(object) {
			hooks = append(hooks, ParseHook(object, pathOf(item, i)))
		}
	}
	return hooks
}

// ForEvent returns the hooks of an event in their execution order: by weight, then by name.
func ForEvent(hooks []Hook, event helm.HookEvent) []Hook {
	var selected []Hook
	for _, h := range hooks {
		if slices.Contains(h.Events, event) {
			selected = append(selected, h)
		}
	}
	slices.SortStableFunc(selected, func(a, b Hook) int {
		return cmp.Or(cmp.Compare(a.Weight, b.Weight), cmp.Compare(a.Object.GetName(), b.Object.GetName()))
	})
	return selected
}

// pathOf returns the template path of object i of a Helm item, or "" if it is not known.
func pathOf(item bundle.Item, i int) string {
	if paths := item.Release.Data.Paths; i < len(paths) {
		return paths[i]
	}
	return ""
}
