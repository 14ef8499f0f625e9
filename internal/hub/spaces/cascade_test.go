package spaces_test

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

// traces are the objects that the hub has of a Cluster in pull mode whose id is its name.
func traces(name string) []client.Object {
	space, role := "karmada-es-"+name, bootstrap.RoleName(name)
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

// credentials are the Secrets that the hub has of a Cluster in push mode.
func credentials(name string) []client.Object {
	return []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: name}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: name + "-impersonator"}},
	}
}

// wantAll wants every one of these objects to be on the hub for a second, and none on its way out: what the garbage collector deletes it deletes
// in the background.
func (w *world) wantAll(t *testing.T, when string, objects []client.Object) {
	t.Helper()
	missing := ""
	_ = wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Second, true, func(context.Context) (bool, error) {
		for _, obj := range objects {
			if !w.has(t, w.hubClient, obj) || !obj.GetDeletionTimestamp().IsZero() {
				missing = fmt.Sprintf("%T %s", obj, client.ObjectKeyFromObject(obj))
			}
		}
		return missing != "", nil
	})
	if missing != "" {
		t.Errorf("%s: %s is gone or goes", when, missing)
	}
}

// wantNone waits until none of these objects is on the hub.
func (w *world) wantNone(t *testing.T, objects []client.Object) {
	t.Helper()
	for _, obj := range objects {
		eventually(t, "no "+obj.GetNamespace()+"/"+obj.GetName(), func() bool { return !w.has(t, w.hubClient, obj) })
	}
}

// collected waits until the garbage collector has done for a Cluster that is being deleted what its cascade asks for.
func (w *world) collected(t *testing.T, c *clusterv1alpha1.Cluster) {
	t.Helper()
	eventually(t, "the garbage collector has done its part", func() bool {
		return w.has(t, w.hubClient, c) && len(c.Finalizers) == 1 && c.Finalizers[0] == clusterv1alpha1.ClusterFinalizer
	})
}

func TestACascadeTakesAwayNeitherTheWithdrawalNorTheEnd(t *testing.T) {
	t.Parallel()
	w := planes(t)
	for _, cascade := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan} {
		t.Run("pull "+string(cascade), func(t *testing.T) {
			t.Parallel()
			name := map[metav1.DeletionPropagation]string{metav1.DeletePropagationForeground: "foreground", metav1.DeletePropagationOrphan: "orphaned"}[cascade]
			c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{ID: name, SyncMode: clusterv1alpha1.Pull}}
			if err := karmada.Enroll(t.Context(), w.hubClient, c); err != nil {
				t.Fatal(err)
			}
			w.settled(t, name)
			eventually(t, "the agent has its rights", func() bool {
				all := true
				for _, obj := range traces(name) {
					all = all && w.has(t, w.hubClient, obj)
				}
				return all
			})
			w.beat(t, name)
			w.report(t, name, metav1.ConditionTrue)
			w.cascades(t, c, cascade, traces(name))
		})
	}
	t.Run("push", func(t *testing.T) {
		for _, cascade := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground, metav1.DeletePropagationOrphan} {
			turn.Lock()
			const name = "cascading"
			err := karmada.Join(t.Context(), karmada.JoinRequest{Hub: w.hub.Config, Member: w.member.Config, Name: name})
			if err == nil {
				c := w.settled(t, name)
				w.report(t, name, metav1.ConditionTrue)
				w.cascades(t, c, cascade, credentials(name))
				eventually(t, "the member is as it was", func() bool { return len(w.left(t, name)) == 0 })
			}
			turn.Unlock()
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

// cascades deletes a Cluster by this cascade while something is to be withdrawn from it. Nobody loses what he needs for that, and in the end
// nothing of the Cluster is left.
func (w *world) cascades(t *testing.T, c *clusterv1alpha1.Cluster, cascade metav1.DeletionPropagation, needed []client.Object) {
	t.Helper()
	work := w.work(t, c.Name)
	if err := w.hubClient.Delete(t.Context(), c, client.PropagationPolicy(cascade)); err != nil {
		t.Fatal(err)
	}
	w.collected(t, c)
	space := &corev1.Namespace{ObjectMeta: named("karmada-es-" + c.Name)}
	w.wantAll(t, "while it is withdrawn", append(needed, space))
	if _, err := w.execute(t.Context(), work); err != nil {
		t.Fatal(err)
	}
	if c.Spec.SyncMode == clusterv1alpha1.Pull {
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: space.Name, Name: c.Name}}
		if !w.has(t, w.hubClient, lease) {
			t.Fatal("no Lease")
		}
		metav1.SetMetaDataAnnotation(&lease.ObjectMeta, kube.AnnotationAgentOrder, "removed")
		if err := w.hubClient.Update(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
	}
	w.wantGone(t, c.Name)
	w.wantNone(t, needed)
}

// beat makes the agent of a Cluster one that is alive.
func (w *world) beat(t *testing.T, name string) {
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

func TestOnlyTheRightsOfAClusterAreSweptThatGoesWithoutAHub(t *testing.T) {
	t.Parallel()
	w := planes(t)
	// The hub was away when this one went: theWorld made what it left before the controller ran.
	w.wantNone(t, []client.Object{&rbacv1.ClusterRole{ObjectMeta: named(bootstrap.RoleName("forgotten"))}})
	w.wantAll(t, "swept", []client.Object{&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "forgotten"}}})
	c := &clusterv1alpha1.Cluster{ObjectMeta: named("torn-out"), Spec: clusterv1alpha1.ClusterSpec{ID: "torn-out", SyncMode: clusterv1alpha1.Pull}}
	if err := karmada.Enroll(t.Context(), w.hubClient, c); err != nil {
		t.Fatal(err)
	}
	w.settled(t, "torn-out")
	if err := bootstrap.Grant(t.Context(), w.hubClient, c); err != nil {
		t.Fatal(err)
	}
	w.wantAll(t, "before", traces("torn-out"))
	// Somebody is in a hurry, and faster than the controller, which would hold the Cluster again.
	eventually(t, "the Cluster is torn out", func() bool {
		free := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		if err := w.hubClient.Patch(t.Context(), c, free); err != nil {
			t.Fatal(err)
		}
		return w.hubClient.Delete(t.Context(), c, client.Preconditions{UID: &c.UID, ResourceVersion: &c.ResourceVersion}) == nil
	})
	// The Lease is left out: if the controller grants the rights while the Cluster is deleted, it deletes them with the Lease.
	rights, rest := traces("torn-out")[:5], traces("torn-out")[6:]
	w.wantNone(t, rights)
	w.wantAll(t, "swept", append(rest, &corev1.Namespace{ObjectMeta: named("karmada-es-torn-out")}))
}
