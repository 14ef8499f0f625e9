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

// Hook is one hook of a release, as its annotations describe it (https://helm.sh/docs/topics/charts_hooks).
type Hook struct {
	Object *unstructured.Unstructured
	Path   string // of the template
	Events []helm.HookEvent
	Weight int
	// DeletePolicies is before-hook-creation where the hook names none, as with Helm.
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

// minJobLife is how many seconds a Job of a hook exists after its end, at least. One with a shorter ttlSecondsAfterFinished may be
// deleted before anybody has read how it ended.
const minJobLife = 3600

// expiresEarly returns whether the hook is a Job that asks to be deleted soon after its end.
func (h Hook) expiresEarly() bool {
	seconds, ok, err := unstructured.NestedInt64(h.Object.Object, "spec", "ttlSecondsAfterFinished")
	return h.Object.GetKind() == "Job" && ok && err == nil && seconds < minJobLife
}

// NewObject returns the object to create for the hook. A Job that would be deleted soon after its end stays for an hour: IsDeletedOn
// returns that it is deleted once its end is known.
func (h Hook) NewObject() (*unstructured.Unstructured, error) {
	object := h.Object.DeepCopy()
	if !h.expiresEarly() {
		return object, nil
	}
	return object, unstructured.SetNestedField(object.Object, int64(minJobLife), "spec", "ttlSecondsAfterFinished")
}

// IsDeletedOn returns whether the hook has a delete policy. CustomResourceDefinitions are never deleted: their objects would be, too.
func (h Hook) IsDeletedOn(policy helm.HookDeletePolicy) bool {
	if h.expiresEarly() && policy != helm.HookBeforeHookCreation {
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

// ForEvent returns the hooks of an event in the order in which they run: by weight, then by name.
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

func pathOf(item bundle.Item, i int) string {
	if paths := item.Release.Data.Paths; i < len(paths) {
		return paths[i]
	}
	return ""
}
