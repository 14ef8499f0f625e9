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

	"github.com/towline/towline/internal/kube"
)

func secrets() schema.GroupVersionResource { return corev1.SchemeGroupVersion.WithResource("secrets") }

// hooksRun returns which hooks of an operation did not run with success.
func (c *comparison) hooksRun(operation string) []string {
	c.Helper()
	var status struct {
		Hooks []helm.Hook `json:"hooks"`
	}
	if err := json.Unmarshal([]byte(must(c.T, c.member.plane, "helm", "status", "-n", namespace, c.chart, "-o", "json")), &status); err != nil {
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

// inventory returns everything on the member, but for events, leases and the like.
func (m *member) inventory(t *testing.T) map[string]bool {
	t.Helper()
	_, lists, err := m.discovery.ServerGroupsAndResources()
	if err != nil {
		t.Log(err) // an aggregated API of the chart that nothing serves
	}
	found := map[string]bool{}
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		for _, resource := range list.APIResources {
			if !slices.Contains(resource.Verbs, "list") || isTransient(resource.Kind) {
				continue
			}
			objects, err := m.metadata.Resource(version.WithResource(resource.Name)).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				continue // the kind is removed at this moment
			}
			for i := range objects.Items {
				o := &objects.Items[i]
				if !isAutomatic(resource.Kind, o) {
					found[fmt.Sprintf("%s.%s %s/%s", resource.Kind, version.Group, o.Namespace, o.Name)] = true
				}
			}
		}
	}
	return found
}

// isTransient returns whether objects of a kind come and go without anybody's doing.
func isTransient(kind string) bool {
	return slices.Contains([]string{"Event", "Lease", "Endpoints", "EndpointSlice", "ComponentStatus", "Node", "ControllerRevision", "IPAddress"}, kind)
}

// isAutomatic returns whether the cluster itself makes an object: in every namespace, for every CRD, or as part of another, or from the claim template of a StatefulSet.
func isAutomatic(kind string, o *metav1.PartialObjectMetadata) bool {
	return o.Name == "kube-root-ca.crt" || kind == "PersistentVolumeClaim" && o.Annotations[kube.AnnotationRequestor] == "" || kind == "ServiceAccount" && o.Name == "default" || metav1.GetControllerOf(o) != nil ||
		kind == "APIService" && o.Labels["kube-aggregator.kubernetes.io/automanaged"] != ""
}

// awaitClean returns what is on the member beside what was there before, and beside what helm leaves, too.
func (m *member) awaitClean(t *testing.T, before map[string]bool, want rendering) []string {
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

// staysAfterHelm returns whether an object stays after `helm uninstall`: the namespace, that of
// Towline itself, namespaces of objects, CRDs of the crds directory, objects with
// resource-policy keep, and hooks that no policy deletes.
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

// set sets the value at a path.
func set(values map[string]any, path []string, value any) {
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
