// Package foreign finds objects in a namespace that do not belong to the caller. A namespace that holds one is not
// deleted with a cluster.
package foreign

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// maxPerKind limits the objects of one kind that are listed. The namespaces of a registration hold far fewer.
const maxPerKind = 500

// Resources lists the namespaced resources that a cluster serves. A discovery client implements it.
type Resources interface {
	ServerPreferredNamespacedResources() ([]*metav1.APIResourceList, error)
}

// Find describes one object in namespace that is neither the caller's own nor created in every namespace by Kubernetes
// or OpenShift, for example "it holds Secret token". It returns "" if there is none, and a reason such as "whether it
// holds a Secret is not known" if the cluster does not answer for all resources. c must read from the API server. isOwn
// gets items with kind and apiVersion set. Objects whose owner is not foreign are not foreign either, and objects that
// are being deleted do not count.
func Find(
	ctx context.Context, c client.Client, resources Resources, namespace string, isOwn func(item *metav1.PartialObjectMetadata) bool,
) (found string, err error) {
	lists, err := resources.ServerPreferredNamespacedResources()
	if discovery.IsGroupDiscoveryFailedError(err) {
		return "which objects it holds is not known: " + err.Error(), nil
	}
	if err != nil {
		return "", fmt.Errorf("list the resources of the cluster: %w", err)
	}
	var all []metav1.PartialObjectMetadata
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return "", fmt.Errorf("list the resources of the cluster: %w", err)
		}
		for i := range list.APIResources {
			if isDerived(&list.APIResources[i]) {
				continue
			}
			items, unknown, err := listObjects(ctx, c, namespace, version.WithKind(list.APIResources[i].Kind))
			if unknown != "" || err != nil {
				return unknown, err
			}
			all = append(all, items...)
		}
	}
	if foreign := removeOwned(all, isOwn); len(foreign) > 0 {
		return "it holds " + foreign[0].Kind + " " + foreign[0].Name, nil
	}
	return "", nil
}

// isDerived returns true for resources that show other objects: those that cannot be created, events, and Endpoints,
// each of which has an EndpointSlice.
func isDerived(resource *metav1.APIResource) bool {
	return !slices.Contains(resource.Verbs, "list") || !slices.Contains(resource.Verbs, "create") ||
		resource.Name == "events" || resource.Name == "endpoints"
}

// listObjects returns the objects of one kind in namespace, or the reason why they are not known.
func listObjects(
	ctx context.Context, c client.Client, namespace string, kind schema.GroupVersionKind,
) (items []metav1.PartialObjectMetadata, unknown string, err error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	err = c.List(ctx, list, client.InNamespace(namespace), client.Limit(maxPerKind))
	switch {
	case apierrors.IsForbidden(err):
		return nil, "whether it holds a " + kind.Kind + " is not known: " + err.Error(), nil
	case apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err), meta.IsNoMatchError(err):
		return nil, "", nil // the kind was removed after discovery
	case err != nil:
		return nil, "", fmt.Errorf("list %s objects in namespace %s: %w", kind.Kind, namespace, err)
	case list.Continue != "":
		return nil, "it holds many " + kind.Kind + " objects", nil
	}
	for i := range list.Items {
		list.Items[i].SetGroupVersionKind(kind)
	}
	return list.Items, "", nil
}

// removeOwned returns the objects that are foreign.
func removeOwned(all []metav1.PartialObjectMetadata, isOwn func(*metav1.PartialObjectMetadata) bool) []metav1.PartialObjectMetadata {
	known := map[types.UID]bool{}
	for i := range all {
		if isInEveryNamespace(&all[i]) || isOwn(&all[i]) {
			known[all[i].UID] = true
		}
	}
	for before := -1; before != len(known); {
		before = len(known)
		for i := range all {
			isOwned := slices.ContainsFunc(all[i].OwnerReferences, func(owner metav1.OwnerReference) bool { return known[owner.UID] })
			// Before Kubernetes 1.24 each ServiceAccount got a Secret with a token.
			if isOwned || known[types.UID(all[i].Annotations[corev1.ServiceAccountUIDKey])] {
				known[all[i].UID] = true
			}
		}
	}
	return slices.DeleteFunc(all, func(item metav1.PartialObjectMetadata) bool {
		return known[item.UID] || item.DeletionTimestamp != nil
	})
}

// isInEveryNamespace returns true for objects that Kubernetes or OpenShift creates in every namespace.
func isInEveryNamespace(item *metav1.PartialObjectMetadata) bool {
	switch item.Kind + "/" + item.Name {
	case "ServiceAccount/default", "ConfigMap/kube-root-ca.crt",
		"ServiceAccount/builder", "ServiceAccount/deployer", "ConfigMap/openshift-service-ca.crt":
		return true
	}
	// OpenShift's let the ServiceAccounts of a namespace use its images.
	return item.Kind == "RoleBinding" && strings.HasPrefix(item.Name, "system:")
}
