package register

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
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// tenantsPage is how many objects of one kind one look into a namespace asks for.
const tenantsPage = 100

// hubUserPrefix begins the annotations by which the registrations of push mode note that they use a namespace of the
// cluster.
const hubUserPrefix = "hub.towline.dev/"

// madeHere says whether a registration made obj, or Karmada itself.
func madeHere(obj client.Object) bool { return obj.GetLabels()[clusterv1alpha1.SystemLabel] == "true" }

// ownNamespace says whether the registration of a cluster made the namespace.
func ownNamespace(namespace *corev1.Namespace, cluster string) bool {
	return madeHere(namespace) && namespace.Labels[RegistrationLabel] == cluster
}

// removeNamespace deletes a namespace that a registration made, unless somebody else has put anything into it.
func (m member) removeNamespace(ctx context.Context, namespace *corev1.Namespace) error {
	if !namespace.DeletionTimestamp.IsZero() {
		return nil
	}
	strange, err := m.stranger(ctx, namespace.Name)
	if err != nil || strange {
		return err
	}
	err = m.Delete(ctx, namespace, client.Preconditions{UID: &namespace.UID})
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete namespace %s on the cluster: %w", namespace.Name, err)
	}
	return nil
}

// removeRecords deletes the namespace of the agent's records if an agent made it, no hub that dials the cluster uses
// it, and nothing is in it.
func (m member) removeRecords(ctx context.Context, name string) error {
	namespace := &corev1.Namespace{}
	found, err := m.find(ctx, client.ObjectKey{Name: name}, namespace)
	if err != nil || !found || !madeHere(namespace) {
		return err
	}
	for key := range namespace.Annotations {
		if strings.HasPrefix(key, hubUserPrefix) {
			return nil
		}
	}
	return m.removeNamespace(ctx, namespace)
}

// stranger says whether a namespace holds something that neither a registration nor Kubernetes put there. What cannot
// be seen may be somebody's.
func (m member) stranger(ctx context.Context, namespace string) (bool, error) {
	lists, err := m.kinds.ServerPreferredNamespacedResources()
	if err != nil {
		return true, nil //nolint:nilerr // an API that does not answer may have something there
	}
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return true, fmt.Errorf("list the kinds of the cluster: %w", err)
		}
		for _, resource := range list.APIResources {
			// What nobody can create is a view of something else, and every Endpoints object has an EndpointSlice.
			passing := resource.Name == "events" || resource.Name == "endpoints" ||
				!slices.Contains(resource.Verbs, "list") || !slices.Contains(resource.Verbs, "create")
			if passing {
				continue
			}
			if strange, err := m.strangerOf(ctx, namespace, version.WithKind(resource.Kind)); strange || err != nil {
				return true, err
			}
		}
	}
	return false, nil
}

// strangerOf is stranger for the objects of one kind.
func (m member) strangerOf(ctx context.Context, namespace string, kind schema.GroupVersionKind) (bool, error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
	err := m.List(ctx, list, client.InNamespace(namespace), client.Limit(tenantsPage))
	switch {
	case apierrors.IsForbidden(err):
		return true, nil
	case apierrors.IsNotFound(err), apierrors.IsMethodNotSupported(err), meta.IsNoMatchError(err):
		return false, nil // the kind has just gone
	case err != nil:
		return true, fmt.Errorf("list %s objects in namespace %s of the cluster: %w", kind.Kind, namespace, err)
	}
	strange := func(item metav1.PartialObjectMetadata) bool {
		return item.DeletionTimestamp.IsZero() && !expected(kind.Kind, &item)
	}
	return list.Continue != "" || slices.ContainsFunc(list.Items, strange), nil
}

// expected says whether an object in the agent's namespace is the agent's, or one of those that Kubernetes and
// OpenShift put into every namespace.
func expected(kind string, item *metav1.PartialObjectMetadata) bool {
	switch kind + "/" + item.Name {
	case "ServiceAccount/default", "ConfigMap/kube-root-ca.crt", "ServiceAccount/builder", "ServiceAccount/deployer", "ConfigMap/openshift-service-ca.crt":
		return true
	}
	// The agents elect one by a Lease.
	if kind == "Lease" && strings.HasPrefix(item.Name, DefaultAgentName+"-") {
		return true
	}
	// What the Deployment made, and what of a registration is on its way out.
	return item.Labels[agentLabel] == agentValue || item.Labels[RegistrationLabel] != "" && madeHere(item)
}
