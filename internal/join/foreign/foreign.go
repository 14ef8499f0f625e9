// Package foreign finds objects in a namespace that do not belong to the caller, so that the namespace must be kept.
// Packages join, karmada, register and agent call it before they delete a namespace.
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

// maxPerKind limits the objects of one kind. A namespace with more is kept: a registration has far fewer.
const maxPerKind = 500

// Resources lists the namespaced resources that a cluster serves. A discovery client implements it.
type Resources interface {
	ServerPreferredNamespacedResources() ([]*metav1.APIResourceList, error)
}

// ReasonToKeep returns the reason why a namespace must be kept, or "" if it may be deleted. The reason is a sentence
// about the namespace: "it holds Secret token", or "whether it holds a Secret is not known". All objects are foreign
// except those for which isOwn returns true, those that Kubernetes or OpenShift creates in every namespace, and the
// dependents of both. Objects that are being deleted do not count. c must read from the API server. isOwn gets items
// with kind and apiVersion.
func ReasonToKeep(
	ctx context.Context, c client.Client, resources Resources, namespace string, isOwn func(item *metav1.PartialObjectMetadata) bool,
) (reason string, err error) {
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
			if isIgnored(&list.APIResources[i]) {
				continue
			}
			items, reason, err := listObjects(ctx, c, namespace, version.WithKind(list.APIResources[i].Kind))
			if reason != "" || err != nil {
				return reason, err
			}
			all = append(all, items...)
		}
	}
	if foreign := foreignObjects(all, isOwn); len(foreign) > 0 {
		return "it holds " + foreign[0].Kind + " " + foreign[0].Name, nil
	}
	return "", nil
}

// DeleteNamespace deletes namespace, which the caller has read, unless there is a ReasonToKeep it. It does nothing if
// the namespace was deleted or created again since its read.
func DeleteNamespace(
	ctx context.Context, c client.Client, resources Resources, namespace client.Object, isOwn func(item *metav1.PartialObjectMetadata) bool,
) (isDeleted bool, err error) {
	reason, err := ReasonToKeep(ctx, c, resources, namespace.GetName(), isOwn)
	if reason != "" || err != nil {
		return false, err
	}
	uid := namespace.GetUID()
	err = c.Delete(ctx, namespace, client.Preconditions{UID: &uid})
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return false, fmt.Errorf("delete namespace %s: %w", namespace.GetName(), err)
	}
	return err == nil, nil
}

// isIgnored returns true for resources that cannot be listed or created, and for those that Kubernetes writes itself.
func isIgnored(resource *metav1.APIResource) bool {
	return !slices.Contains(resource.Verbs, "list") || !slices.Contains(resource.Verbs, "create") ||
		resource.Name == "events" || resource.Name == "endpoints"
}

// listObjects returns the objects of one kind in namespace, or a reason to keep the namespace.
func listObjects(
	ctx context.Context, c client.Client, namespace string, kind schema.GroupVersionKind,
) (items []metav1.PartialObjectMetadata, reason string, err error) {
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

func foreignObjects(all []metav1.PartialObjectMetadata, isOwn func(*metav1.PartialObjectMetadata) bool) []metav1.PartialObjectMetadata {
	notForeign := map[types.UID]bool{}
	for i := range all {
		if isInEveryNamespace(&all[i]) || isOwn(&all[i]) {
			notForeign[all[i].UID] = true
		}
	}
	// Repeat until no object is added: owners can be later in the list.
	for size := -1; size != len(notForeign); {
		size = len(notForeign)
		for i := range all {
			isOwned := slices.ContainsFunc(all[i].OwnerReferences, func(owner metav1.OwnerReference) bool { return notForeign[owner.UID] })
			// Before Kubernetes 1.24 each ServiceAccount got a Secret with a token.
			if isOwned || notForeign[types.UID(all[i].Annotations[corev1.ServiceAccountUIDKey])] {
				notForeign[all[i].UID] = true
			}
		}
	}
	return slices.DeleteFunc(all, func(item metav1.PartialObjectMetadata) bool {
		return notForeign[item.UID] || item.DeletionTimestamp != nil
	})
}

func isInEveryNamespace(item *metav1.PartialObjectMetadata) bool {
	switch item.Kind + "/" + item.Name {
	case "ServiceAccount/default", "ConfigMap/kube-root-ca.crt", // Kubernetes
		"ServiceAccount/builder", "ServiceAccount/deployer", "ConfigMap/openshift-service-ca.crt": // OpenShift
		return true
	}
	// OpenShift creates RoleBindings system:* in each namespace for its image registry.
	return item.Kind == "RoleBinding" && strings.HasPrefix(item.Name, "system:")
}
