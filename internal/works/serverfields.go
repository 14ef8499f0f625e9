package works

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// removeServerFields removes the fields that the server or a controller of the cluster sets. Manifests are often copies
// of objects of another cluster.
func removeServerFields(obj *unstructured.Unstructured) {
	remove := func(path ...string) { unstructured.RemoveNestedField(obj.Object, path...) }
	for _, field := range []string{
		"creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "managedFields", "resourceVersion", "selfLink",
		"uid", "ownerReferences", "finalizers",
	} {
		remove("metadata", field)
	}
	remove("status")
	switch obj.GroupVersionKind().Group + "/" + obj.GetKind() {
	case "apps/Deployment":
		removeAnnotations(obj, func(name string) bool { return strings.HasPrefix(name, "deployment.kubernetes.io/") })
	case "batch/Job":
		removeJobFields(obj)
	case "/Service":
		if ip, _, err := unstructured.NestedString(obj.Object, "spec", "clusterIP"); err != nil || ip != corev1.ClusterIPNone {
			remove("spec", "clusterIP")
			remove("spec", "clusterIPs")
		}
		remove("spec", "healthCheckNodePort")
	case "/ServiceAccount":
		remove("secrets")
	case "/PersistentVolumeClaim":
		removeAnnotations(obj, func(name string) bool {
			return name == "volume.kubernetes.io/selected-node" || strings.HasPrefix(name, "pv.kubernetes.io/")
		})
	}
}

// removeJobFields removes the generated selector and labels of a Job, and its TTL: the engine would create an expired
// Job again.
func removeJobFields(obj *unstructured.Unstructured) {
	unstructured.RemoveNestedField(obj.Object, "spec", "ttlSecondsAfterFinished")
	if manual, _, err := unstructured.NestedBool(obj.Object, "spec", "manualSelector"); err == nil && manual {
		return
	}
	unstructured.RemoveNestedField(obj.Object, "spec", "selector")
	for _, path := range [][]string{{"metadata", "labels"}, {"spec", "template", "metadata", "labels"}} {
		for _, name := range []string{"controller-uid", "job-name", "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name"} {
			unstructured.RemoveNestedField(obj.Object, append(path[:len(path):len(path)], name)...)
		}
	}
}

func removeAnnotations(obj *unstructured.Unstructured, matches func(name string) bool) {
	annotations := obj.GetAnnotations()
	for name := range annotations {
		if matches(name) {
			delete(annotations, name)
		}
	}
	obj.SetAnnotations(annotations)
}
