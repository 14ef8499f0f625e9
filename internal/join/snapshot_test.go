package join_test

import (
	"context"
	"fmt"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// without is a reader for which one object does not exist.
type without struct {
	client.Reader
	key client.ObjectKey
}

func (r without) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	if key == r.key {
		return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
	}
	return r.Reader.Get(ctx, key, obj, opts...)
}

// findEstablished compares a cluster with a new Snapshot.
func findEstablished(t *testing.T, hub, cache client.Reader, cluster *libv1beta1.SveltosCluster) (delivery string) {
	t.Helper()
	snapshot, err := join.TakeSnapshot(t.Context(), hub)
	if err != nil {
		t.Fatal(err)
	}
	if delivery, err = snapshot.FindEstablished(t.Context(), cache, cluster); err != nil {
		t.Fatal(err)
	}
	return delivery
}

func TestSnapshotHasEstablishedClusters(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	namespace := newNamespace(t, hubClient, "snapshot")
	first, second := declared(t, hubClient, namespace, "one"), declared(t, hubClient, namespace, "two")
	for _, cluster := range []*libv1beta1.SveltosCluster{first, second} {
		if delivery := findEstablished(t, hubClient, hubClient, cluster); delivery != "" {
			t.Errorf("%s before Establish: got %q", cluster.Name, delivery)
		}
		established(t, hubClient, cluster)
	}
	if got := findEstablished(t, hubClient, hubClient, first); got != namespace {
		t.Errorf("the first cluster: got delivery namespace %q, want %q", got, namespace)
	}
	if got := findEstablished(t, hubClient, hubClient, second); got != "" {
		t.Errorf("the second cluster without its annotation: got %q", got)
	}
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(second), second); err != nil {
		t.Fatal(err)
	}
	if got, want := findEstablished(t, hubClient, hubClient, second), namespace+"--two"; got != want {
		t.Errorf("the second cluster: got delivery namespace %q, want %q", got, want)
	}
	again := first.DeepCopy()
	again.UID = "other"
	if got := findEstablished(t, hubClient, hubClient, again); got != "" {
		t.Errorf("another cluster with the same name: got %q", got)
	}
	for _, key := range []client.ObjectKey{{Name: kube.AgentNamespace}, {Namespace: kube.AgentNamespace, Name: "towline-shared-bundles"}} {
		reader := without{hubClient, key}
		if got := findEstablished(t, reader, reader, first); got != "" {
			t.Errorf("without %s: got %q", key, got)
		}
	}
}

func TestSnapshotFindsChanges(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	object := func(obj client.Object, namespace, name string) client.Object {
		obj.SetNamespace(namespace)
		obj.SetName(name)
		return obj
	}
	for name, c := range map[string]struct {
		obj    func(namespace string) client.Object
		change func(client.Object) // nil: delete
	}{
		"ServiceAccount": {obj: func(ns string) client.Object { return object(&corev1.ServiceAccount{}, ns, "c") }},
		"anchor":         {obj: func(ns string) client.Object { return object(&corev1.Secret{}, ns, join.AnchorSecret("c")) }},
		"Lease":          {obj: func(ns string) client.Object { return object(&coordinationv1.Lease{}, ns, "c") }},
		"Role":           {obj: func(ns string) client.Object { return object(&rbacv1.Role{}, ns, "c") }},
		"RoleBinding":    {obj: func(ns string) client.Object { return object(&rbacv1.RoleBinding{}, ns, "c") }},
		"shared binding": {obj: func(ns string) client.Object {
			return object(&rbacv1.RoleBinding{}, kube.AgentNamespace, ns+":c")
		}},
		"rules": {
			obj:    func(ns string) client.Object { return object(&rbacv1.Role{}, ns, "c") },
			change: func(obj client.Object) { obj.(*rbacv1.Role).Rules = obj.(*rbacv1.Role).Rules[1:] },
		},
		"subjects": {
			obj:    func(ns string) client.Object { return object(&rbacv1.RoleBinding{}, ns, "c") },
			change: func(obj client.Object) { obj.(*rbacv1.RoleBinding).Subjects[0].Name = "other" },
		},
		"owner": {
			obj:    func(ns string) client.Object { return object(&corev1.Secret{}, ns, join.AnchorSecret("c")) },
			change: func(obj client.Object) { obj.SetOwnerReferences(nil) },
		},
		"label": {
			obj:    func(ns string) client.Object { return object(&corev1.ServiceAccount{}, ns, "c") },
			change: func(obj client.Object) { obj.SetLabels(nil) },
		},
		"claim": {
			obj:    func(ns string) client.Object { return object(&corev1.Namespace{}, "", ns) },
			change: func(obj client.Object) { delete(obj.GetAnnotations(), kube.AnnotationDeliveryHolder) },
		},
		"deletion": {
			obj: func(ns string) client.Object { return object(&corev1.ServiceAccount{}, ns, "c") },
			change: func(obj client.Object) {
				// It stays until the end of the test, with a deletionTimestamp.
				obj.SetFinalizers([]string{"towline.dev/test"})
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			namespace := newNamespace(t, hubClient, "changes")
			cluster := declared(t, hubClient, namespace, "c")
			established(t, hubClient, cluster)
			obj := c.obj(namespace)
			if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil {
				t.Fatal(err)
			}
			if c.change != nil {
				c.change(obj)
				if err := hubClient.Update(t.Context(), obj); err != nil {
					t.Fatal(err)
				}
			}
			if c.change == nil || len(obj.GetFinalizers()) > 0 && name == "deletion" {
				if err := hubClient.Delete(t.Context(), obj); err != nil {
					t.Fatal(err)
				}
			}
			if got := findEstablished(t, hubClient, hubClient, cluster); got != "" {
				t.Errorf("got delivery namespace %q, want none", got)
			}
		})
	}
}

// TestSnapshotReadsAllPages lists more objects than one response has.
func TestSnapshotReadsAllPages(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	namespace := newNamespace(t, hubClient, "pages")
	var clusters []*libv1beta1.SveltosCluster
	for i := range 3 {
		cluster := declared(t, hubClient, namespace, fmt.Sprint("c", i))
		established(t, hubClient, cluster)
		if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			t.Fatal(err)
		}
		clusters = append(clusters, cluster)
	}
	snapshot, err := join.TakeSnapshot(t.Context(), onePerPage{hubClient})
	if err != nil {
		t.Fatal(err)
	}
	for _, cluster := range clusters {
		if got, err := snapshot.FindEstablished(t.Context(), hubClient, cluster); got == "" || err != nil {
			t.Errorf("%s: got %q, %v", cluster.Name, got, err)
		}
	}
	if err := hubClient.Delete(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "c0"}}); err != nil {
		t.Fatal(err)
	}
	if got := findEstablished(t, onePerPage{hubClient}, hubClient, clusters[0]); got != "" {
		t.Errorf("got %q for a cluster without ServiceAccount", got)
	}
}

// onePerPage is a reader with one object in each response.
type onePerPage struct{ client.Reader }

func (r onePerPage) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	return r.Reader.List(ctx, list, append(opts, client.Limit(1))...)
}
