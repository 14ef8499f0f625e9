package executionnamespaces_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

// memberLock is held by the test that registers the member, which can be in the fleet only once.
var memberLock sync.Mutex

func (w *testEnv) exists(t *testing.T, reader client.Client, obj client.Object) bool {
	t.Helper()
	err := reader.Get(t.Context(), client.ObjectKeyFromObject(obj), obj)
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return err == nil
}

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

// awaitReady waits until the Cluster has its finalizer and its execution namespace, and returns it.
func (w *testEnv) awaitReady(t *testing.T, name string) *clusterv1alpha1.Cluster {
	t.Helper()
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name)}
	eventually(t, "cluster "+name+" has its finalizer and its execution namespace", func() bool {
		space := &corev1.Namespace{ObjectMeta: named("karmada-es-" + name)}
		return w.exists(t, w.hubClient, c) && controllerutil.ContainsFinalizer(c, clusterv1alpha1.ClusterFinalizer) && c.Annotations[kube.AnnotationHub] != "" &&
			w.exists(t, w.hubClient, space) && space.Labels[clusterv1alpha1.SystemLabel] == "true" && karmada.Owner(space) == c.Name
	})
	return c
}

// setReady sets the Ready condition of the Cluster.
func (w *testEnv) setReady(t *testing.T, name string, ready metav1.ConditionStatus) {
	t.Helper()
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name)}
	err := kube.RetryOnConflict(t.Context(), func() error {
		if err := w.hubClient.Get(t.Context(), client.ObjectKeyFromObject(c), c); err != nil {
			return err
		}
		c.Status.KubernetesVersion = "v1.36.3"
		meta.SetStatusCondition(&c.Status.Conditions, metav1.Condition{Type: clusterv1alpha1.ClusterConditionReady, Status: ready, Reason: "Test"})
		return w.hubClient.Status().Update(t.Context(), c)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// createWork creates a Work and waits until it has its finalizer.
func (w *testEnv) createWork(t *testing.T, cluster string) *workv1alpha1.Work {
	t.Helper()
	work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + cluster, Name: "w"}}
	if err := w.hubClient.Create(t.Context(), work); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the Work has its finalizer", func() bool {
		return w.exists(t, w.hubClient, work) && controllerutil.ContainsFinalizer(work, workv1alpha1.ExecutionFinalizer)
	})
	return work
}

// withdrawWork waits for the deletion of a Work and removes its finalizer, like the controller of Works or an agent. It
// returns the Cluster at that time.
func (w *testEnv) withdrawWork(ctx context.Context, work *workv1alpha1.Work) (*clusterv1alpha1.Cluster, error) {
	name, _ := fleet.ClusterOfExecutionSpace(work.Namespace)
	c := &clusterv1alpha1.Cluster{ObjectMeta: named(name)}
	for {
		if err := w.hubClient.Get(ctx, client.ObjectKeyFromObject(work), work); err != nil {
			return nil, err
		}
		if !work.DeletionTimestamp.IsZero() {
			break
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
	if err := w.hubClient.Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
		return nil, err
	}
	controllerutil.RemoveFinalizer(work, workv1alpha1.ExecutionFinalizer)
	return c, w.hubClient.Update(ctx, work)
}

// wantDeleted waits until no object of the Cluster is on the hub.
func (w *testEnv) wantDeleted(t *testing.T, name string) {
	t.Helper()
	eventually(t, "everything of "+name+" is deleted", func() bool {
		return !w.exists(t, w.hubClient, &clusterv1alpha1.Cluster{ObjectMeta: named(name)}) &&
			!w.exists(t, w.hubClient, &corev1.Namespace{ObjectMeta: named("karmada-es-" + name)}) &&
			!w.exists(t, w.hubClient, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: name}}) &&
			!w.exists(t, w.hubClient, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: name + "-impersonator"}})
	})
}

// memberObjects lists the objects of a push registration on the member.
func (w *testEnv) memberObjects(t *testing.T, name string) []string {
	t.Helper()
	var remaining []string
	for _, obj := range []client.Object{
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: "karmada-" + name}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: "karmada-" + name}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: "karmada-impersonator"}},
		&rbacv1.ClusterRole{ObjectMeta: named("karmada-controller-manager:karmada-" + name)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named("karmada-controller-manager:karmada-" + name)},
		&corev1.Namespace{ObjectMeta: named("karmada-cluster")},
	} {
		if w.exists(t, w.memberClient, obj) {
			remaining = append(remaining, fmt.Sprintf("%T %s", obj, obj.GetName()))
		}
	}
	return remaining
}

func TestRemovalDeletesThePushRegistration(t *testing.T) {
	t.Parallel()
	w := sharedEnv(t)
	tests := map[string]karmada.UnjoinRequest{"plain": {}, "orphan": {Orphan: true}}
	for _, kind := range []string{"plain", "orphan"} {
		t.Run(kind, func(t *testing.T) {
			memberLock.Lock()
			defer memberLock.Unlock()
			name := "push-" + kind
			if err := karmada.Join(t.Context(), karmada.JoinRequest{Hub: w.hub.Config, Member: w.member.Config, Name: name}); err != nil {
				t.Fatal(err)
			}
			w.awaitReady(t, name)
			w.setReady(t, name, metav1.ConditionTrue)
			work := w.createWork(t, name)
			seen, failed := make(chan *clusterv1alpha1.Cluster, 1), make(chan error, 1)
			go func() {
				c, err := w.withdrawWork(t.Context(), work)
				seen <- c
				failed <- err
			}()
			request := tests[kind]
			request.Hub, request.Name, request.Timeout, request.Progress = w.hub.Config, name, 20*time.Second, func(string) {}
			start := time.Now()
			// The hub has a kubeconfig of the member.
			if err := karmada.Unjoin(t.Context(), request); err != nil {
				t.Fatal(err)
			}
			t.Logf("unjoined in %s", time.Since(start))
			c, err := <-seen, <-failed
			if err != nil {
				t.Fatal(err)
			}
			if got := fleet.FromCluster(c); got.KeepAddons != request.Orphan || got.Forced || got.Abandoned {
				t.Errorf("Cluster during the withdrawal: got request %+v, want KeepAddons %t and no force", got, request.Orphan)
			}
			w.wantDeleted(t, name)
			eventually(t, "the member has no objects of the registration", func() bool { return len(w.memberObjects(t, name)) == 0 })
		})
	}
}

func TestRemovalDoesNotWaitForUnreachableMember(t *testing.T) {
	t.Parallel()
	w := sharedEnv(t)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "theirs"}, Data: map[string][]byte{"token": []byte("x"), "caBundle": []byte("x")}}
	if err := w.hubClient.Create(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	tests := map[string]clusterv1alpha1.ClusterSpec{
		"gone-push": {ID: "gone-push", SyncMode: clusterv1alpha1.Push, APIEndpoint: "https://127.0.0.1:1", SecretRef: &clusterv1alpha1.LocalSecretReference{Namespace: "default", Name: "theirs"}},
		"gone-pull": {ID: "gone-pull", SyncMode: clusterv1alpha1.Pull},
	}
	for name, spec := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := w.hubClient.Create(t.Context(), &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: spec}); err != nil {
				t.Fatal(err)
			}
			c := w.awaitReady(t, name)
			w.setReady(t, name, metav1.ConditionUnknown)
			w.createWork(t, name)
			// No controller reconciles the summary.
			summary := &configv1beta1.ClusterSummary{
				ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + name, Name: "s", Finalizers: []string{configv1beta1.ClusterSummaryFinalizer}},
				Spec:       configv1beta1.ClusterSummarySpec{ClusterNamespace: "karmada-es-" + name, ClusterName: name, ClusterType: "Karmada"},
			}
			if err := w.hubClient.Create(t.Context(), summary); err != nil {
				t.Fatal(err)
			}
			// A hub that was killed has left the object.
			left := &configv1beta1.ClusterConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + name, Name: "karmada--" + name}}
			if err := w.hubClient.Create(t.Context(), left); err != nil {
				t.Fatal(err)
			}
			if err := w.hubClient.Delete(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			w.wantDeleted(t, name)
			if w.exists(t, w.hubClient, left) {
				t.Error("the ClusterConfiguration is not deleted")
			}
		})
	}
	t.Cleanup(func() {
		if err := w.hubClient.Get(context.WithoutCancel(t.Context()), client.ObjectKeyFromObject(secret), secret); err != nil {
			t.Errorf("a Secret that no registration created: %v", err)
		}
	})
}

func TestAgentIsRequestedToRemoveItself(t *testing.T) {
	t.Parallel()
	w := sharedEnv(t)
	c := &clusterv1alpha1.Cluster{ObjectMeta: named("told"), Spec: clusterv1alpha1.ClusterSpec{ID: "told", SyncMode: clusterv1alpha1.Pull}}
	if err := karmada.CreateCluster(t.Context(), w.hubClient, c); err != nil {
		t.Fatal(err)
	}
	w.awaitReady(t, "told")
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-told", Name: "told"}}
	eventually(t, "the agent has its Lease", func() bool { return w.exists(t, w.hubClient, lease) })
	lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
	if err := w.hubClient.Update(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	w.setReady(t, "told", metav1.ConditionTrue)
	if err := w.hubClient.Delete(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent is ordered to remove itself", func() bool {
		return w.exists(t, w.hubClient, c) && c.Annotations[kube.AnnotationAgentRequest] == kube.AgentRequestRemove
	})
	metav1.SetMetaDataAnnotation(&lease.ObjectMeta, kube.AnnotationAgentRequest, "removed")
	if err := w.hubClient.Update(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	w.wantDeleted(t, "told")
	claim := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: "cluster-id-told"}}
	eventually(t, "the claim is deleted", func() bool { return !w.exists(t, w.hubClient, claim) })
}

func TestSecondClusterWithSameIDWaitsForFirst(t *testing.T) {
	t.Parallel()
	w := sharedEnv(t)
	first := &clusterv1alpha1.Cluster{ObjectMeta: named("rival-1"), Spec: clusterv1alpha1.ClusterSpec{ID: "rival", SyncMode: clusterv1alpha1.Pull}}
	if err := w.hubClient.Create(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	w.awaitReady(t, "rival-1")
	second := &clusterv1alpha1.Cluster{ObjectMeta: named("rival-2"), Spec: first.Spec}
	if err := w.hubClient.Create(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	want := "the cluster ID rival or the cluster name rival-2 has been registered"
	eventually(t, "the second is refused", func() bool {
		return w.exists(t, w.hubClient, second) && fleet.FromCluster(second).Refused == want
	})
	if len(second.Finalizers) > 0 || w.exists(t, w.hubClient, &corev1.Namespace{ObjectMeta: named("karmada-es-rival-2")}) {
		t.Error("objects were created for the second Cluster")
	}
	if err := w.hubClient.Delete(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	w.wantDeleted(t, "rival-1")
	if got := fleet.FromCluster(w.awaitReady(t, "rival-2")).Refused; got != "" {
		t.Errorf("the second Cluster after the deletion of the first: refused for %q", got)
	}
}

func TestDeletedExecutionNamespaceIsCreatedAgain(t *testing.T) {
	t.Parallel()
	w := sharedEnv(t)
	c := &clusterv1alpha1.Cluster{ObjectMeta: named("anew"), Spec: clusterv1alpha1.ClusterSpec{ID: "anew", SyncMode: clusterv1alpha1.Pull}}
	if err := w.hubClient.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	w.awaitReady(t, "anew")
	space := &corev1.Namespace{ObjectMeta: named("karmada-es-anew")}
	if !w.exists(t, w.hubClient, space) {
		t.Fatal("no execution namespace")
	}
	uid := space.UID
	if err := w.hubClient.Delete(t.Context(), space); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a new namespace exists, with the agent's Role", func() bool {
		roles := &rbacv1.RoleList{}
		err := errors.Join(client.IgnoreNotFound(w.hubClient.Get(t.Context(), client.ObjectKeyFromObject(space), space)),
			w.hubClient.List(t.Context(), roles, client.InNamespace(space.Name)))
		if err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		has := slices.ContainsFunc(roles.Items, func(r rbacv1.Role) bool { return r.Name == "system:karmada:anew:agent" })
		return space.UID != uid && space.DeletionTimestamp.IsZero() && has
	})
}
