package register_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/register"
)

func TestRegisterWaitsForUninstallation(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	for name, c := range map[string]struct {
		owner   string
		deleted bool
		want    string
	}{
		"owned-foreign": {owner: "owned-foreign-operator"},
		"owned-deleted": {
			owner: register.AgentRole("owned-deleted"), deleted: true,
			want: "a former agent is still being removed from the cluster: Namespace /owned-deleted",
		},
	} {
		r, _, _ := w.request(t, name)
		r.DryRun, r.DiscoveryTimeout = true, 2*time.Second
		owner := w.ownedNamespace(t, c.owner, name)
		if c.deleted {
			if err := w.admin.Delete(t.Context(), owner); err != nil {
				t.Fatal(err)
			}
		}
		err := register.Register(t.Context(), r)
		if c.want != "" {
			wantText(t, err, c.want)
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := w.admin.Patch(t.Context(), owner, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
			t.Error(err)
		}
	}
}

// ownedNamespace creates a ClusterRole, whose finalizer keeps it, and a namespace that it owns.
func (w testEnv) ownedNamespace(t *testing.T, role, namespace string) *rbacv1.ClusterRole {
	t.Helper()
	owner := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: role, Finalizers: []string{"towline.dev/test"}}}
	if err := w.admin.Create(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	owned := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, OwnerReferences: []metav1.OwnerReference{{
		APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: role, UID: owner.UID,
	}}}}
	if err := w.admin.Create(t.Context(), owned); err != nil {
		t.Fatal(err)
	}
	return owner
}
