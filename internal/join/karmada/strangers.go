package karmada

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const (
	// strangersPage is how many objects of one kind one look into a namespace asks for: more than two registrations leave
	// there.
	strangersPage = 100
	// definitionsPage is how many CustomResourceDefinitions are read at once; each may have some hundred kilobytes.
	definitionsPage = 50
)

// builtIn are the kinds of Kubernetes that people make in namespaces. What controllers derive from them is not listed.
func builtIn() []schema.GroupVersionKind {
	var kinds []schema.GroupVersionKind
	for version, names := range map[schema.GroupVersion][]string{
		{Version: "v1"}: {
			"ConfigMap", "Secret", "ServiceAccount", "Pod", "Service", "PersistentVolumeClaim", "ReplicationController", "LimitRange", "ResourceQuota",
			"PodTemplate",
		},
		{Group: "apps", Version: "v1"}:                      {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"},
		{Group: "batch", Version: "v1"}:                     {"Job", "CronJob"},
		{Group: "networking.k8s.io", Version: "v1"}:         {"Ingress", "NetworkPolicy"},
		{Group: "rbac.authorization.k8s.io", Version: "v1"}: {"Role", "RoleBinding"},
		{Group: "policy", Version: "v1"}:                    {"PodDisruptionBudget"},
		{Group: "autoscaling", Version: "v1"}:               {"HorizontalPodAutoscaler"},
		{Group: "coordination.k8s.io", Version: "v1"}:       {"Lease"},
	} {
		for _, name := range names {
			kinds = append(kinds, version.WithKind(name))
		}
	}
	return kinds
}

// custom lists the kinds in namespaces that CustomResourceDefinitions declare.
func (f footprint) custom(ctx context.Context) ([]schema.GroupVersionKind, error) {
	var kinds []schema.GroupVersionKind
	next := ""
	for {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinitionList"})
		if err := f.member.List(ctx, list, client.Limit(definitionsPage), client.Continue(next)); err != nil {
			return nil, fmt.Errorf("list the kinds of the cluster: %w", err)
		}
		for i := range list.Items {
			if kind, ok := declared(list.Items[i].Object); ok {
				kinds = append(kinds, kind)
			}
		}
		if next = list.GetContinue(); next == "" {
			return kinds, nil
		}
	}
}

// declared returns one served version of the kind in namespaces that a CustomResourceDefinition declares, if it does.
func declared(definition map[string]any) (schema.GroupVersionKind, bool) {
	scope, _, _ := unstructured.NestedString(definition, "spec", "scope")
	group, _, _ := unstructured.NestedString(definition, "spec", "group")
	kind, _, _ := unstructured.NestedString(definition, "spec", "names", "kind")
	versions, _, _ := unstructured.NestedSlice(definition, "spec", "versions")
	for _, item := range versions {
		version, _ := item.(map[string]any)
		if name, _ := version["name"].(string); version["served"] == true && scope == "Namespaced" {
			return schema.GroupVersionKind{Group: group, Version: name, Kind: kind}, true
		}
	}
	return schema.GroupVersionKind{}, false
}

// stranger names something in the namespace that neither this registration nor Kubernetes put there, or says why that
// is not known; "" if there is nothing.
func (f footprint) stranger(ctx context.Context) (string, error) {
	if f.namespace == systemNamespace {
		return "it is that of a control plane", nil
	}
	for _, kind := range builtIn() {
		if strange, err := f.among(ctx, kind); strange != "" || err != nil {
			return strange, err
		}
	}
	kinds, err := f.custom(ctx)
	if err != nil {
		return "", err
	}
	for _, kind := range kinds {
		if strange, err := f.among(ctx, kind); strange != "" || err != nil {
			return strange, err
		}
	}
	return "", nil
}

// among is stranger for the objects of one kind.
func (f footprint) among(ctx context.Context, kind schema.GroupVersionKind) (string, error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	err := f.member.List(ctx, list, client.InNamespace(f.namespace), client.Limit(strangersPage))
	switch {
	case apierrors.IsForbidden(err):
		return "whether it holds a " + kind.Kind + " is not known", nil
	case apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err), meta.IsNoMatchError(err):
		return "", nil // the cluster does not serve the kind
	case err != nil:
		return "", fmt.Errorf("list %s objects in namespace %s of the cluster: %w", kind.Kind, f.namespace, err)
	case list.Continue != "":
		return "it holds many " + kind.Kind + " objects", nil
	}
	for i := range list.Items {
		item := &list.Items[i]
		if item.DeletionTimestamp.IsZero() && !f.expected(kind.Kind, item) {
			return "it holds " + kind.Kind + " " + item.Name, nil
		}
	}
	return "", nil
}

// expected says whether this registration made item, or Kubernetes or OpenShift, which put some into every namespace.
func (f footprint) expected(kind string, item *metav1.PartialObjectMetadata) bool {
	switch kind + "/" + item.Name {
	case "ServiceAccount/default", "ConfigMap/kube-root-ca.crt", "ServiceAccount/builder", "ServiceAccount/deployer", "ConfigMap/openshift-service-ca.crt":
		return true
	case "ServiceAccount/" + f.account(), "Secret/" + f.account():
		return f.isOurs(item)
	}
	return false
}
