package executionnamespaces_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

// hubObjects returns the objects on the hub of a Cluster in pull mode whose ID is its name.
func hubObjects(name string) []client.Object {
	space, role := "karmada-es-"+name, karmada.AgentRoleName(name)
	in := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name}
	}
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: named(role)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named(role)},
		&rbacv1.Role{ObjectMeta: in(space, role)},
		&rbacv1.RoleBinding{ObjectMeta: in(space, role)},
		&rbacv1.RoleBinding{ObjectMeta: in(kube.AgentNamespace, role)},
		&coordinationv1.Lease{ObjectMeta: in(space, name)},
		&corev1.ConfigMap{ObjectMeta: in("karmada-cluster", "cluster-id-"+name)},
	}
}

// credentialSecrets returns the Secrets on the hub of a Cluster in push mode.
func credentialSecrets(name string) []client.Object {
	return []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: name}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: name + "-impersonator"}},
	}
}

// wantExist checks for one second that all objects are on the hub and none is being deleted, because the garbage
// collector works in the background.
func (w *testEnv) wantExist(t *testing.T, moment string, objects []client.Object) {
	t.Helper()
	missing := ""
	_ = wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Second, true, func(context.Context) (bool, error) {
		for _, obj := range objects {
			if !w.exists(t, w.hubClient, obj) || !obj.GetDeletionTimestamp().IsZero() {
				missing = fmt.Sprintf("%T %s", obj, client.ObjectKeyFromObject(obj))
			}
		}
		return missing != "", nil
	})
	if missing != "" {
		t.Errorf("%s: %s is deleted or being deleted", moment, missing)
	}
}

// awaitNone waits until none of these objects is on the hub.
func (w *testEnv) awaitNone(t *testing.T, objects []client.Object) {
	t.Helper()
	for _, obj := range objects {
		eventually(t, "no "+obj.GetNamespace()+"/"+obj.GetName(), func() bool { return !w.exists(t, w.hubClient, obj) })
	}
}

// awaitGarbageCollector waits until the garbage collector has handled the propagation policy of a Cluster that is being
// deleted.
func (w *testEnv) awaitGarbageCollector(t *testing.T, c *clusterv1alpha1.Cluster) {
	t.Helper()
	eventually(t, "the garbage collector has removed its finalizer", func() bool {
		return w.exists(t, w.hubClient, c) && len(c.Finalizers) == 1 && c.Finalizers[0] == clusterv1alpha1.ClusterFinalizer
	})
}

func TestPropagationPolicyKeepsObjectsThatTheRemovalNeeds(t *testing.T) {
	t.Parallel()
	w := sharedEnv(t)
	for _, cascade := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan} {
		t.Run("pull "+string(cascade), func(t *testing.T) {
			t.Parallel()
			name := map[metav1.DeletionPropagation]string{metav1.DeletePropagationForeground: "foreground", metav1.DeletePropagationOrphan: "orphaned"}[cascade]
			c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{ID: name, SyncMode: clusterv1alpha1.Pull}}
			if err := karmada.CreateCluster(t.Context(), w.hubClient, c); err != nil {
				t.Fatal(err)
			}
			w.awaitReady(t, name)
			eventually(t, "the agent has its RBAC", func() bool {
				all := true
				for _, obj := range hubObjects(name) {
					all = all && w.exists(t, w.hubClient, obj)
				}
				return all
			})
			w.renewLease(t, name)
			w.setReady(t, name, metav1.ConditionTrue)
			w.deleteCluster(t, c, cascade, hubObjects(name))
		})
	}
	t.Run("push", func(t *testing.T) {
		for _, cascade := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan} {
			memberLock.Lock()
			const name = "cascading"
			err := karmada.Join(t.Context(), karmada.JoinRequest{Hub: w.hub.Config, Member: w.member.Config, Name: name})
			if err == nil {
				c := w.awaitReady(t, name)
				w.setReady(t, name, metav1.ConditionTrue)
				w.deleteCluster(t, c, cascade, credentialSecrets(name))
				eventually(t, "the member has no objects of the registration", func() bool { return len(w.memberObjects(t, name)) == 0 })
			}
			memberLock.Unlock()
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

// deleteCluster deletes a Cluster with this propagation policy while a Work is withdrawn. The needed objects must stay
// until the withdrawal is done. Afterwards, no object of the Cluster may be left.
func (w *testEnv) deleteCluster(t *testing.T, c *clusterv1alpha1.Cluster, cascade metav1.DeletionPropagation, needed []client.Object) {
	t.Helper()
	work := w.createWork(t, c.Name)
	if err := w.hubClient.Delete(t.Context(), c, client.PropagationPolicy(cascade)); err != nil {
		t.Fatal(err)
	}
	w.awaitGarbageCollector(t, c)
	space := &corev1.Namespace{ObjectMeta: named("karmada-es-" + c.Name)}
	w.wantExist(t, "during the withdrawal", append(needed, space))
	if _, err := w.withdrawWork(t.Context(), work); err != nil {
		t.Fatal(err)
	}
	if c.Spec.SyncMode == clusterv1alpha1.Pull {
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: space.Name, Name: c.Name}}
		if !w.exists(t, w.hubClient, lease) {
			t.Fatal("no Lease")
		}
		metav1.SetMetaDataAnnotation(&lease.ObjectMeta, kube.AnnotationAgentRequest, "removed")
		if err := w.hubClient.Update(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
	}
	w.wantDeleted(t, c.Name)
	w.awaitNone(t, needed)
}

// renewLease renews the Lease of the agent of a Cluster.
func (w *testEnv) renewLease(t *testing.T, name string) {
	t.Helper()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + name, Name: name}}
	if err := w.hubClient.Get(t.Context(), client.ObjectKeyFromObject(lease), lease); err != nil {
		t.Fatal(err)
	}
	lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
	if err := w.hubClient.Update(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
}

func TestHubDeletesOnlyRBACOfClusterDeletedWithoutFinalizer(t *testing.T) {
	t.Parallel()
	w := sharedEnv(t)
	// startEnv has created the ClusterRole and the Secret before the start of the controller, as if the Cluster had been
	// deleted without a hub.
	w.awaitNone(t, []client.Object{&rbacv1.ClusterRole{ObjectMeta: named(karmada.AgentRoleName("forgotten"))}})
	w.wantExist(t, "after the cleanup", []client.Object{&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "forgotten"}}})
	c := &clusterv1alpha1.Cluster{ObjectMeta: named("torn-out"), Spec: clusterv1alpha1.ClusterSpec{ID: "torn-out", SyncMode: clusterv1alpha1.Pull}}
	if err := karmada.CreateCluster(t.Context(), w.hubClient, c); err != nil {
		t.Fatal(err)
	}
	w.awaitReady(t, "torn-out")
	if err := bootstrap.EnsureAgentRBAC(t.Context(), w.hubClient, c); err != nil {
		t.Fatal(err)
	}
	w.wantExist(t, "before", hubObjects("torn-out"))
	// The test removes the finalizer and deletes the Cluster before the controller can set the finalizer again.
	eventually(t, "the Cluster is deleted without its finalizer", func() bool {
		changed := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		if err := w.hubClient.Patch(t.Context(), c, changed); err != nil {
			t.Fatal(err)
		}
		return w.hubClient.Delete(t.Context(), c, client.Preconditions{UID: &c.UID, ResourceVersion: &c.ResourceVersion}) == nil
	})
	// The Lease is omitted: if the controller creates the RBAC objects while the Cluster is deleted, it deletes them with
	// the Lease.
	rbac, rest := hubObjects("torn-out")[:5], hubObjects("torn-out")[6:]
	w.awaitNone(t, rbac)
	w.wantExist(t, "after the cleanup", append(rest, &corev1.Namespace{ObjectMeta: named("karmada-es-torn-out")}))
}
