package registration_test

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta/testrestmapper"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub/registration"
	"github.com/towline/towline/internal/kube"
)

// A snapshot from before a change must not hide that the change could not be repaired.
func TestFailedRepairIsRepeatedDespiteSnapshot(t *testing.T) {
	t.Parallel()
	cluster := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "c", UID: "uid", Finalizers: []string{kube.FinalizerCluster}},
		Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	failure, lists := error(nil), 0
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithRESTMapper(testrestmapper.TestOnlyStaticRESTMapper(kube.Scheme())).WithObjects(cluster, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "fleet"}}).
		WithStatusSubresource(cluster).WithInterceptorFuncs(interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			if failure != nil {
				return failure
			}
			return c.Create(ctx, obj, opts...)
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if _, ok := list.(*rbacv1.RoleList); ok {
				lists++
			}
			return c.List(ctx, list, opts...)
		},
	}).Build()
	reconcile := func(c *registration.Controller) error {
		_, err := c.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(cluster)})
		return err
	}
	newController := func() *registration.Controller {
		return &registration.Controller{
			Hub: hub, Live: hub, Cache: hub, Locks: &registration.ClusterLocks{}, Events: events.NewFakeRecorder(10),
			EnsureManifest: func(context.Context, *libv1beta1.SveltosCluster) (time.Duration, error) { return 0, nil },
		}
	}
	if err := reconcile(newController()); err != nil {
		t.Fatal(err)
	}
	restarted := newController()
	if err := reconcile(restarted); err != nil || lists != 2 {
		t.Fatalf("after a restart: %v, %d snapshots, want one of each process", err, lists)
	}

	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "c"}}
	if err := hub.Delete(t.Context(), role); err != nil {
		t.Fatal(err)
	}
	if err := hub.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
		t.Fatal(err)
	}
	cluster.Labels = map[string]string{"check": "again"}
	if err := hub.Update(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	failure = errors.New("the API server is not available")
	if err := reconcile(restarted); !errors.Is(err, failure) {
		t.Fatalf("got error %v, want %v", err, failure)
	}
	failure = nil
	if err := reconcile(restarted); err != nil {
		t.Fatal(err)
	}
	if err := hub.Get(t.Context(), client.ObjectKeyFromObject(role), role); err != nil || lists != 2 {
		t.Errorf("the Role: %v, %d snapshots, want 2", err, lists)
	}
}
