package charts

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	helm "helm.sh/helm/v4/pkg/release/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/kube"
)

func secrets() schema.GroupVersionResource { return corev1.SchemeGroupVersion.WithResource("secrets") }

// failedHooks returns the hooks of an operation that did not succeed.
func (c *comparison) failedHooks(operation string) []string {
	c.Helper()
	var status struct {
		Hooks []helm.Hook `json:"hooks"`
	}
	if err := json.Unmarshal([]byte(mustRun(c.T, c.member.plane, "helm", "status", "-n", namespace, c.chart, "-o", "json")), &status); err != nil {
		c.Fatal(err)
	}
	var missed []string
	for _, hook := range status.Hooks {
		for _, event := range hook.Events {
			ofOperation := event == helm.HookEvent("pre-"+operation) || event == helm.HookEvent("post-"+operation)
			if ofOperation && hook.LastRun.Phase != helm.HookPhaseSucceeded {
				missed = append(missed, fmt.Sprintf("hook %s %s of %s: %q", hook.Kind, hook.Name, event, hook.LastRun.Phase))
			}
		}
	}
	return missed
}

// item is an object on a member.
type item struct {
	resource schema.GroupVersionResource
	meta     *metav1.PartialObjectMetadata
}

// inventory returns the keys of all objects on the member, except for kinds like events and leases.
func (m *member) inventory(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	for key := range m.items(t) {
		found[key] = true
	}
	return found
}

// items returns the objects of the inventory by key.
func (m *member) items(t *testing.T) map[string]item {
	t.Helper()
	_, lists, err := m.discovery.ServerGroupsAndResources()
	if err != nil {
		t.Log(err) // an aggregated API of the chart that nothing serves
	}
	found := map[string]item{}
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		for _, resource := range list.APIResources {
			if !slices.Contains(resource.Verbs, "list") || isTransient(resource.Kind) {
				continue
			}
			gvr := version.WithResource(resource.Name)
			objects, err := m.metadata.Resource(gvr).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				continue // the kind is removed at this moment
			}
			for i := range objects.Items {
				o := &objects.Items[i]
				if !isAutomatic(resource.Kind, o) {
					found[fmt.Sprintf("%s.%s %s/%s", resource.Kind, version.Group, o.Namespace, o.Name)] = item{gvr, o}
				}
			}
		}
	}
	return found
}

// deleteLeftovers deletes all objects that were not on the member before the first chart: the namespaces and
// definitions that helm leaves. It returns whether that succeeded.
func (m *member) deleteLeftovers(t *testing.T) bool {
	t.Helper()
	return await(emptyLimit, func() string {
		problem := ""
		for key, it := range m.items(t) {
			if !m.initial[key] && it.meta.Namespace != kube.AgentNamespace {
				problem = key + " is still there"
				m.deleteObject(t, it)
			}
		}
		return problem
	}) == ""
}

// deleteObject deletes an object, and the finalizers whose controller is not running.
func (m *member) deleteObject(t *testing.T, it item) {
	t.Helper()
	api := m.metadata.Resource(it.resource).Namespace(it.meta.Namespace)
	if it.meta.DeletionTimestamp == nil {
		_ = api.Delete(t.Context(), it.meta.Name, metav1.DeleteOptions{}) // the next check reports a failure
		return
	}
	if len(it.meta.Finalizers) > 0 && it.resource.Group != "apiextensions.k8s.io" {
		patch := []byte(`{"metadata":{"finalizers":null}}`)
		_, _ = api.Patch(t.Context(), it.meta.Name, types.MergePatchType, patch, metav1.PatchOptions{}) // likewise
	}
}

// isTransient returns whether the cluster creates and deletes objects of a kind by itself.
func isTransient(kind string) bool {
	return slices.Contains([]string{"Event", "Lease", "Endpoints", "EndpointSlice", "ComponentStatus", "Node", "ControllerRevision", "IPAddress"}, kind)
}

// isAutomatic returns whether the cluster itself creates an object: in every namespace, for every CRD, as part of
// another object, or from the claim template of a StatefulSet. Helm leaves the latter, too.
func isAutomatic(kind string, o *metav1.PartialObjectMetadata) bool {
	return o.Name == "kube-root-ca.crt" || kind == "PersistentVolumeClaim" && o.Annotations[kube.AnnotationRequestor] == "" || kind == "ServiceAccount" && o.Name == "default" || metav1.GetControllerOf(o) != nil ||
		kind == "APIService" && o.Labels["kube-aggregator.kubernetes.io/automanaged"] != ""
}

// awaitRemoved waits until the member has only the objects from before and the objects that helm leaves. It returns the
// other ones.
func (m *member) awaitRemoved(t *testing.T, before map[string]bool, want rendering) []string {
	t.Helper()
	var left []string
	await(30*time.Second, func() string {
		left = nil
		for key := range m.inventory(t) {
			if !before[key] && !staysAfterHelm(key, want) {
				left = append(left, key)
			}
		}
		slices.Sort(left)
		return strings.Join(left, ", ")
	})
	return left
}

// staysAfterHelm returns whether an object stays after `helm uninstall`: the namespace of the release, Towline's
// namespace, namespaces of objects, CRDs of the crds directory, objects with resource-policy keep, and hooks that no
// policy deletes.
func staysAfterHelm(key string, want rendering) bool {
	if key == "Namespace. /"+namespace || key == "Namespace. /"+kube.AgentNamespace || want.crds[key] != nil {
		return true
	}
	if object := want.manifest[key]; object != nil {
		return object.GetAnnotations()[kube.AnnotationKeep] == "keep"
	}
	for _, object := range want.manifest {
		if key == "Namespace. /"+object.GetNamespace() {
			return true // helm does not create it
		}
	}
	hook := want.hooks[key]
	return hook != nil && !strings.Contains(hook.GetAnnotations()[helm.HookDeleteAnnotation], string(helm.HookSucceeded))
}

// candidate is a value of a chart that may be changed.
type candidate struct {
	path  []string
	value any
}

// candidates returns values to try in an upgrade: numbers of replicas first, then tags of images and limits of memory.
func candidates(values map[string]any) []candidate {
	var replicas, tags, memory []candidate
	var walk func(path []string, values map[string]any)
	walk = func(path []string, values map[string]any) {
		for name, value := range values {
			at := append(slices.Clone(path), name)
			switch value := value.(type) {
			case map[string]any:
				walk(at, value)
			case float64:
				if name == "replicas" || name == "replicaCount" {
					replicas = append(replicas, candidate{path: at, value: value + 1})
				}
			case string:
				switch name {
				case "tag":
					tags = append(tags, candidate{path: at, value: "v99.0.0"})
				case "memory":
					memory = append(memory, candidate{path: at, value: "777Mi"})
				}
			}
		}
	}
	walk(nil, values)
	for _, list := range [][]candidate{replicas, tags, memory} {
		slices.SortFunc(list, func(a, b candidate) int {
			if len(a.path) != len(b.path) {
				return len(a.path) - len(b.path)
			}
			return slices.Compare(a.path, b.path)
		})
	}
	return slices.Concat(replicas[:min(len(replicas), 6)], tags[:min(len(tags), 6)], memory[:min(len(memory), 6)])
}

// setValue sets the value at a path.
func setValue(values map[string]any, path []string, value any) {
	for _, name := range path[:len(path)-1] {
		nested, ok := values[name].(map[string]any)
		if !ok {
			nested = map[string]any{}
			values[name] = nested
		}
		values = nested
	}
	values[path[len(path)-1]] = value
}
