package chaos

import (
	"context"
	"fmt"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// ownerLabel is on all objects of others. Its value is foreignOwner.
const (
	ownerLabel   = "owner"
	foreignOwner = "others"
)

// foreignLog has the original objects of others on one cluster: uid and resourceVersion by kind and name. It has no
// resourceVersion for the namespaces in which Towline registers clusters: Towline may change its labels on them.
type foreignLog map[string]string

// foreignObjects returns objects of others in a namespace. They have the labels and annotations that Sveltos and Helm
// set, and that Towline sets beside its own ones.
func foreignObjects(namespace, name string) []client.Object {
	meta := foreignMeta(namespace, name)
	return []client.Object{
		&corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"text": "not yours"}},
		&corev1.Secret{ObjectMeta: meta, Data: map[string][]byte{"text": []byte("not yours")}},
		&corev1.ServiceAccount{ObjectMeta: meta},
		&rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get"}}}},
	}
}

func foreignMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: namespace, Name: name,
		Labels: map[string]string{ownerLabel: foreignOwner, kube.LabelReason: "Resources", "app.kubernetes.io/managed-by": "Helm"},
		Annotations: map[string]string{
			kube.AnnotationOwnerKind: "ClusterProfile", kube.AnnotationOwnerName: "content-0", kube.AnnotationReferenceKind: "ConfigMap",
			kube.AnnotationReferenceNS: "default", kube.AnnotationReferenceName: "content-0", "meta.helm.sh/release-name": "theirs",
		},
	}
}

func isForeign(object client.Object) bool { return object.GetLabels()[ownerLabel] == foreignOwner }

// createForeign creates objects of others in a namespace that exists.
func (f *fleet) createForeign(admin client.Client, made foreignLog, namespace, name string) {
	f.t.Helper()
	for _, object := range foreignObjects(namespace, name) {
		f.retry("create an object of others in namespace "+namespace, func() error { return admin.Create(f.t.Context(), object) })
		kind, err := admin.GroupVersionKindFor(object)
		if err != nil {
			f.t.Fatal(err)
		}
		made.add(kind.Kind, object)
	}
}

func (l foreignLog) add(kind string, object client.Object) {
	version := object.GetResourceVersion()
	if kind == "Namespace" && (object.GetName() == kube.AgentNamespace || object.GetName() == clusters) {
		version = "any"
	}
	l[describe(kind, object)] = fmt.Sprintf("uid %s, resourceVersion %s, deleted: %v", object.GetUID(), version, object.GetDeletionTimestamp())
}

// createNamespace creates a namespace of others.
func (f *fleet) createNamespace(admin client.Client, made foreignLog, name string) {
	f.t.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{ownerLabel: foreignOwner}}}
	f.retry("create namespace "+name, func() error {
		err := admin.Create(f.t.Context(), namespace)
		if apierrors.IsAlreadyExists(err) {
			return admin.Get(f.t.Context(), client.ObjectKeyFromObject(namespace), namespace)
		}
		return err
	})
	made.add("Namespace", namespace)
}

// createForeignClusterRole creates a ClusterRole of others, with the same labels and annotations as foreignObjects.
func (f *fleet) createForeignClusterRole(admin client.Client, made foreignLog) {
	f.t.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: foreignMeta("", "theirs")}
	f.retry("create a ClusterRole of others", func() error { return admin.Create(f.t.Context(), role) })
	made.add("ClusterRole", role)
}

// wantForeign checks that the objects of others on a cluster are unchanged.
func (f *fleet) wantForeign(cluster string, admin client.Client, made foreignLog) {
	f.t.Helper()
	found := foreignLog{}
	f.retry("list the objects of others on "+cluster, func() error {
		clear(found)
		kinds := []schema.GroupVersionKind{core("ConfigMap"), core("Secret"), core("ServiceAccount"), core("Namespace"), rbac("Role"), rbac("ClusterRole")}
		objects, err := listMetadata(f.t.Context(), admin, kinds, client.MatchingLabels{ownerLabel: foreignOwner})
		for _, object := range objects {
			found.add(object.Kind, &object)
		}
		return err
	})
	if diff := gocmp.Diff(made, found); diff != "" {
		f.t.Fatalf("%s: objects of others (-made +found):\n%s", cluster, diff)
	}
}

func core(kind string) schema.GroupVersionKind { return corev1.SchemeGroupVersion.WithKind(kind) }

func rbac(kind string) schema.GroupVersionKind { return rbacv1.SchemeGroupVersion.WithKind(kind) }

// describe returns kind, namespace and name of an object.
func describe(kind string, object client.Object) string {
	return kind + " " + client.ObjectKeyFromObject(object).String()
}

// listMetadata lists the metadata of all objects of some kinds. The objects have their kinds.
func listMetadata(
	ctx context.Context, admin client.Client, kinds []schema.GroupVersionKind, options ...client.ListOption,
) ([]metav1.PartialObjectMetadata, error) {
	var all []metav1.PartialObjectMetadata
	for _, kind := range kinds {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err := admin.List(ctx, list, options...); err != nil {
			return nil, fmt.Errorf("list objects of kind %s: %w", kind.Kind, err)
		}
		for i := range list.Items {
			list.Items[i].SetGroupVersionKind(kind)
		}
		all = append(all, list.Items...)
	}
	return all, nil
}
