package works

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// prune takes out of a manifest what only the server, or a controller of the cluster, is to say about an object. Manifests are often copies
// of objects that live somewhere else.
func prune(obj *unstructured.Unstructured) {
	drop := func(path ...string) { unstructured.RemoveNestedField(obj.Object, path...) }
	for _, field := range []string{
		"creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "managedFields", "resourceVersion", "selfLink",
		"uid", "ownerReferences", "finalizers",
	} {
		drop("metadata", field)
	}
	drop("status")
	switch obj.GroupVersionKind().Group + "/" + obj.GetKind() {
	case "apps/Deployment":
		dropAnnotations(obj, func(name string) bool { return strings.HasPrefix(name, "deployment.kubernetes.io/") })
	case "batch/Job":
		pruneJob(obj)
	case "/Service":
		if ip, _, err := unstructured.NestedString(obj.Object, "spec", "clusterIP"); err != nil || ip != corev1.ClusterIPNone {
			drop("spec", "clusterIP")
			drop("spec", "clusterIPs")
		}
		drop("spec", "healthCheckNodePort")
	case "/ServiceAccount":
		drop("secrets")
	case "/PersistentVolumeClaim":
		dropAnnotations(obj, func(name string) bool {
			return name == "volume.kubernetes.io/selected-node" || strings.HasPrefix(name, "pv.kubernetes.io/")
		})
	}
}

// pruneJob drops the selector that the cluster makes for a Job, and how long the Job is kept: a Job that is cleaned up would be made again.
func pruneJob(obj *unstructured.Unstructured) {
	unstructured.RemoveNestedField(obj.Object, "spec", "ttlSecondsAfterFinished")
	if manual, _, err := unstructured.NestedBool(obj.Object, "spec", "manualSelector"); err == nil && manual {
		return
	}
	unstructured.RemoveNestedField(obj.Object, "spec", "selector")
	for _, where := range [][]string{{"metadata", "labels"}, {"spec", "template", "metadata", "labels"}} {
		for _, name := range []string{"controller-uid", "job-name", "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name"} {
			unstructured.RemoveNestedField(obj.Object, append(where[:len(where):len(where)], name)...)
		}
	}
}

func dropAnnotations(obj *unstructured.Unstructured, is func(name string) bool) {
	annotations := obj.GetAnnotations()
	for name := range annotations {
		if is(name) {
			delete(annotations, name)
		}
	}
	obj.SetAnnotations(annotations)
}
