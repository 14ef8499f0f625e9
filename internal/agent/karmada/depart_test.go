package karmada

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
)

// install makes on the member what a registration makes there, and returns a way to it as the agent's own account.
func (w *world) install(others ...rbacv1.Subject) *rest.Config {
	w.t.Helper()
	meta := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true"}}
	}
	account := &corev1.ServiceAccount{ObjectMeta: meta(w.place, register.AgentAccount)}
	labels := map[string]string{"app": "karmada-agent"}
	deployment := &appsv1.Deployment{ObjectMeta: meta(w.place, register.DefaultAgentName)}
	deployment.Spec.Replicas = new(int32)
	deployment.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	deployment.Spec.Template.Labels = labels
	deployment.Spec.Template.Spec.Containers = []corev1.Container{{Name: "agent", Image: "none"}}
	role := &rbacv1.ClusterRole{ObjectMeta: meta("", register.AgentRole), Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}, {NonResourceURLs: []string{"*"}, Verbs: []string{"get"}},
	}}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta("", register.AgentRole), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: register.AgentRole},
		Subjects: append([]rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: w.place, Name: register.AgentAccount}}, others...),
	}
	for _, obj := range []client.Object{account, deployment, role, binding} {
		if err := w.memberClient.Create(w.t.Context(), obj); err != nil {
			w.t.Fatal(err)
		}
	}
	token := &authenticationv1.TokenRequest{}
	if err := w.memberClient.SubResource("token").Create(w.t.Context(), account, token); err != nil {
		w.t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(w.member.Config)
	config.BearerToken = token.Status.Token
	return config
}

// order deletes the Cluster and has the hub order the agent to leave.
func (w *world) order() {
	w.t.Helper()
	if err := w.hubClient.Delete(w.t.Context(), w.cluster()); err != nil {
		w.t.Fatal(err)
	}
	w.patchCluster(`{"metadata":{"annotations":{"` + kube.AnnotationAgentOrder + `":"` + kube.AgentOrderRemove + `"}}}`)
}

func (w *world) hold() {
	w.t.Helper()
	w.patchCluster(`{"metadata":{"finalizers":["` + clusterv1alpha1.ClusterFinalizer + `"]}}`)
}

func (w *world) answered() {
	w.t.Helper()
	w.eventually("the hub has its answer", func(ctx context.Context) error {
		lease, err := w.lease(ctx)
		if err == nil && lease.Annotations[kube.AnnotationAgentOrder] != orderDone {
			err = errors.New("it has none")
		}
		return err
	})
}

// own are the agent's objects on the member.
func (w *world) own() []client.Object {
	return []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.place, Name: register.KubeconfigSecret}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.place, Name: register.AgentAccount}},
		&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: w.place, Name: register.DefaultAgentName}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.place}},
	}
}

func sharedObjects() []client.Object {
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: register.AgentRole}},
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: register.AgentRole}},
	}
}

// The ClusterRole has one name on a member: these take turns.
func TestAgentRemovesItself(t *testing.T) {
	t.Parallel()
	t.Run("wherever it is interrupted", testInterruptedRemoval)
	t.Run("and leaves what another agent uses", testSharedRemoval)
	t.Run("only by an order", testNoRemoval)
}

func testInterruptedRemoval(t *testing.T) {
	for writes, finished := 0, false; !finished; writes++ {
		if writes > 14 {
			t.Fatal("the removal takes more writes than it should")
		}
		w := newWorld(t, fmt.Sprintf("cut%d", writes), time.Hour)
		account := w.install()
		w.hold()
		cut := newBreaker(writes)
		ended, stop, _ := w.start(func(o *Options) { o.Member = cut.wrap(account) })
		w.ready()
		cut.arm()
		w.order()
		select {
		case <-cut.broken:
			stop()
			_, stop, _ = w.start(func(o *Options) { o.Member = account })
		case err := <-ended:
			finished = true
			if err != nil {
				t.Error(err)
			}
		}
		w.answered()
		for _, obj := range append(w.own(), sharedObjects()...) {
			w.gone(w.memberClient, obj)
		}
		w.gone(w.memberClient, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.options.ClusterNamespace}})
		stop()
		w.patchCluster(`{"metadata":{"finalizers":null}}`)
	}
}

func testSharedRemoval(t *testing.T) {
	other := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: "elsewhere", Name: register.AgentAccount}
	for writes, finished := 0, false; !finished; writes++ {
		if writes > 14 {
			t.Fatal("the removal takes more writes than it should")
		}
		w := newWorld(t, fmt.Sprintf("shared%d", writes), time.Hour)
		account := w.install(other)
		w.hold()
		// Somebody else's: the namespace stays.
		stranger := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.place, Name: "stranger"}}
		strange := writes%2 == 0
		if strange {
			if err := w.memberClient.Create(t.Context(), stranger); err != nil {
				t.Fatal(err)
			}
		}
		cut := newBreaker(writes)
		ended, stop, _ := w.start(func(o *Options) { o.Member = cut.wrap(account) })
		w.ready()
		cut.arm()
		w.order()
		select {
		case <-cut.broken:
			stop()
			_, stop, _ = w.start(func(o *Options) { o.Member = account })
		case err := <-ended:
			finished = true
			if err != nil {
				t.Error(err)
			}
		}
		w.answered()
		if strange {
			for _, obj := range w.own()[:3] {
				w.gone(w.memberClient, obj)
			}
			if err := w.memberClient.Get(t.Context(), client.ObjectKeyFromObject(stranger), stranger); err != nil || stranger.DeletionTimestamp != nil {
				t.Errorf("another one's ConfigMap: %v", err)
			}
		} else {
			// What is in it goes with it.
			w.gone(w.memberClient, w.own()[3])
		}
		stop()
		binding := &rbacv1.ClusterRoleBinding{}
		if err := w.memberClient.Get(t.Context(), client.ObjectKey{Name: register.AgentRole}, binding); err != nil {
			t.Fatal(err)
		}
		if len(binding.Subjects) != 1 || binding.Subjects[0] != other {
			t.Errorf("subjects that are left: %v", binding.Subjects)
		}
		for _, obj := range sharedObjects() {
			if err := w.memberClient.Delete(t.Context(), obj); err != nil {
				t.Fatal(err)
			}
		}
		w.patchCluster(`{"metadata":{"finalizers":null}}`)
	}
}

func testNoRemoval(t *testing.T) {
	w := newWorld(t, "kept", time.Hour)
	w.install()
	w.hold()
	w.start()
	w.ready()
	untouched := func(when string) {
		t.Helper()
		w.settle(2 * time.Second)
		for _, obj := range append(w.own(), sharedObjects()...) {
			if err := w.memberClient.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil || obj.GetDeletionTimestamp() != nil || len(obj.GetOwnerReferences()) > 0 {
				t.Errorf("%s: %T %s: error %v, owners %v", when, obj, obj.GetName(), err, obj.GetOwnerReferences())
			}
		}
	}
	w.patchCluster(`{"metadata":{"annotations":{"` + kube.AnnotationAgentOrder + `":"` + kube.AgentOrderRemove + `"}}}`)
	untouched("an order on a Cluster that nobody deletes")
	w.patchCluster(`{"metadata":{"annotations":{"` + kube.AnnotationAgentOrder + `":null}}}`)
	if err := w.hubClient.Delete(t.Context(), w.cluster()); err != nil {
		t.Fatal(err)
	}
	untouched("a deletion without an order")
	w.patchCluster(`{"metadata":{"finalizers":null}}`)
	untouched("a Cluster that is gone")
	err := w.hubClient.Get(t.Context(), client.ObjectKey{Name: w.name}, &clusterv1alpha1.Cluster{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("the Cluster: %v", err)
	}
	for _, obj := range sharedObjects() {
		if err := w.memberClient.Delete(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
}
