package foreign_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

func isOwn(item *metav1.PartialObjectMetadata) bool { return item.Labels["own"] == "true" }

func in(namespace, name string, own bool) metav1.ObjectMeta {
	object := metav1.ObjectMeta{Namespace: namespace, Name: name}
	if own {
		object.Labels = map[string]string{"own": "true"}
	}
	return object
}

func create(t *testing.T, c client.Client, objects ...client.Object) {
	t.Helper()
	for _, obj := range objects {
		if err := c.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
}

func start(t *testing.T) (client.WithWatch, *discovery.DiscoveryClient) {
	t.Helper()
	plane := localkube.Shared(t)
	c, err := client.NewWithWatch(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c, discovery.NewDiscoveryClientForConfigOrDie(plane.Config)
}

func TestFind(t *testing.T) {
	t.Parallel()
	c, resources := start(t)
	createWidgetKind(t, c)
	widget := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Widget"}}
	widget.SetName("w")
	tests := map[string]struct {
		objects func(namespace string) []client.Object
		want    string
	}{
		"nothing": {},
		"own": {objects: func(n string) []client.Object {
			return []client.Object{&corev1.Secret{ObjectMeta: in(n, "token", true)}}
		}},
		"created by OpenShift": {objects: func(n string) []client.Object {
			return []client.Object{
				&corev1.ServiceAccount{ObjectMeta: in(n, "builder", false)}, &corev1.ConfigMap{ObjectMeta: in(n, "openshift-service-ca.crt", false)},
				&rbacv1.RoleBinding{ObjectMeta: in(n, "system:image-pullers", false), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "x"}},
			}
		}},
		"event": {objects: func(n string) []client.Object {
			return []client.Object{&corev1.Event{ObjectMeta: in(n, "e", false), InvolvedObject: corev1.ObjectReference{Namespace: n}}}
		}},
		"foreign": {objects: func(n string) []client.Object {
			return []client.Object{&corev1.Secret{ObjectMeta: in(n, "token", false)}, &corev1.ConfigMap{ObjectMeta: in(n, "own", true)}}
		}, want: "it holds Secret token"},
		"foreign object of a custom resource": {objects: func(n string) []client.Object {
			w := widget.DeepCopy()
			w.SetNamespace(n)
			return []client.Object{w}
		}, want: "it holds Widget w"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNamespace(t, c)
			if test.objects != nil {
				create(t, c, test.objects(n)...)
			}
			awaitDefaults(t, c, n)
			got, err := foreign.ReasonToKeep(t.Context(), c, resources, n, isOwn)
			if err != nil || got != test.want {
				t.Errorf("got %q, %v, want %q", got, err, test.want)
			}
		})
	}
}

func TestFindFollowsOwners(t *testing.T) {
	t.Parallel()
	c, resources := start(t)
	n := newNamespace(t, c)
	last := &corev1.ConfigMap{ObjectMeta: in(n, "own", true)}
	create(t, c, last)
	for _, name := range []string{"child", "grandchild"} {
		obj := &corev1.ConfigMap{ObjectMeta: in(n, name, false)}
		obj.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: last.Name, UID: last.UID}}
		create(t, c, obj)
		last = obj
	}
	account := &corev1.ServiceAccount{ObjectMeta: in(n, "account", true)}
	create(t, c, account)
	token := &corev1.Secret{ObjectMeta: in(n, "account-token-x", false), Type: corev1.SecretTypeServiceAccountToken}
	token.Annotations = map[string]string{corev1.ServiceAccountNameKey: account.Name, corev1.ServiceAccountUIDKey: string(account.UID)}
	create(t, c, token)
	if got, err := foreign.ReasonToKeep(t.Context(), c, resources, n, isOwn); err != nil || got != "" {
		t.Errorf("got %q, %v, want nothing", got, err)
	}
	got, err := foreign.ReasonToKeep(t.Context(), c, resources, n, func(item *metav1.PartialObjectMetadata) bool { return item.Kind == "ServiceAccount" })
	if err != nil || !strings.HasPrefix(got, "it holds ConfigMap ") {
		t.Errorf("the same objects, not owned: got %q, %v", got, err)
	}
}

func TestFindIgnoresObjectsBeingDeleted(t *testing.T) {
	t.Parallel()
	c, resources := start(t)
	n := newNamespace(t, c)
	leaving := &corev1.ConfigMap{ObjectMeta: in(n, "leaving", false)}
	leaving.Finalizers = []string{"example.com/wait"}
	create(t, c, leaving)
	if got, err := foreign.ReasonToKeep(t.Context(), c, resources, n, isOwn); err != nil || got != "it holds ConfigMap leaving" {
		t.Errorf("before: got %q, %v", got, err)
	}
	if err := c.Delete(t.Context(), leaving); err != nil {
		t.Fatal(err)
	}
	if got, err := foreign.ReasonToKeep(t.Context(), c, resources, n, isOwn); err != nil || got != "" {
		t.Errorf("got %q, %v, want nothing", got, err)
	}
}

type resourcesFunc func() ([]*metav1.APIResourceList, error)

func (f resourcesFunc) ServerPreferredNamespacedResources() ([]*metav1.APIResourceList, error) {
	return f()
}

// A caller must not delete a namespace because the cluster did not answer.
func TestFindReportsMissingAnswers(t *testing.T) {
	t.Parallel()
	c, resources := start(t)
	n := newNamespace(t, c)
	failing := func(failure error) client.Client {
		return interceptor.NewClient(c, interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if list.GetObjectKind().GroupVersionKind().Kind == "SecretList" {
				return failure
			}
			return c.List(ctx, list, opts...)
		}})
	}
	secrets := schema.GroupResource{Resource: "secrets"}
	groupFailed := resourcesFunc(func() ([]*metav1.APIResourceList, error) {
		return nil, &discovery.ErrGroupDiscoveryFailed{Groups: map[schema.GroupVersion]error{{Group: "metrics.k8s.io", Version: "v1"}: errors.New("down")}}
	})
	broken := errors.New("broken")
	tests := map[string]struct {
		client    client.Client
		resources foreign.Resources
		want      string
		err       error
	}{
		"forbidden":          {client: failing(apierrors.NewForbidden(secrets, "", nil)), want: "whether it holds a Secret is not known"},
		"removed resource":   {client: failing(apierrors.NewNotFound(secrets, ""))},
		"group not answered": {resources: groupFailed, want: "which objects it holds is not known: "},
		"list fails":         {client: failing(broken), err: broken},
		"discovery fails":    {resources: resourcesFunc(func() ([]*metav1.APIResourceList, error) { return nil, broken }), err: broken},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if test.client == nil {
				test.client = c
			}
			if test.resources == nil {
				test.resources = resources
			}
			got, err := foreign.ReasonToKeep(t.Context(), test.client, test.resources, n, isOwn)
			if !errors.Is(err, test.err) || !strings.HasPrefix(got, test.want) || (got == "") != (test.want == "") {
				t.Errorf("got %q, %v, want %q, %v", got, err, test.want, test.err)
			}
		})
	}
}

func newNamespace(t *testing.T, c client.Client) string {
	t.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "foreign-"}}
	create(t, c, namespace)
	return namespace.Name
}

// awaitDefaults waits for the objects that Kubernetes creates in every namespace, if this control plane creates them.
func awaitDefaults(t *testing.T, c client.Client, namespace string) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 20*time.Second, true, func(ctx context.Context) (bool, error) {
		key := client.ObjectKey{Namespace: namespace, Name: "default"}
		return c.Get(ctx, key, &corev1.ServiceAccount{}) == nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func createWidgetKind(t *testing.T, c client.Client) {
	t.Helper()
	preserve := true
	create(t, c, &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "widgets.example.com"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "example.com", Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "widgets", Kind: "Widget"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true, Schema: &apiextensionsv1.CustomResourceValidation{
					OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: &preserve},
				},
			}},
		},
	})
	list := &unstructured.UnstructuredList{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "WidgetList"}}
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 20*time.Second, true, func(ctx context.Context) (bool, error) {
		return c.List(ctx, list.DeepCopy()) == nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
