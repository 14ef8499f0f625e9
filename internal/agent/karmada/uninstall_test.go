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

// installAgent creates the objects of a registration on the member, and returns a client configuration for the agent's
// account.
func (w *world) installAgent() *rest.Config {
	w.t.Helper()
	name := register.AgentRole(w.agentNamespace)
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: w.name,
	}}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}, {NonResourceURLs: []string{"*"}, Verbs: []string{"get"}},
	}}
	if err := w.memberClient.Create(w.t.Context(), role); err != nil {
		w.t.Fatal(err)
	}
	owners := []metav1.OwnerReference{{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: name, UID: role.UID}}
	meta := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{
			Namespace: namespace, Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true"}, OwnerReferences: owners,
		}
	}
	account := &corev1.ServiceAccount{ObjectMeta: meta(w.agentNamespace, register.AgentServiceAccount)}
	labels := map[string]string{"app": "karmada-agent"}
	deployment := &appsv1.Deployment{ObjectMeta: meta(w.agentNamespace, register.DefaultAgentDeployment)}
	deployment.Spec.Replicas = new(int32)
	deployment.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
	deployment.Spec.Template.Labels = labels
	deployment.Spec.Template.Spec.Containers = []corev1.Container{{Name: "agent", Image: "none"}}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta("", name), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: w.agentNamespace, Name: register.AgentServiceAccount}},
	}
	for _, obj := range []client.Object{account, deployment, binding} {
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

// requestRemoval deletes the Cluster and sets the hub's removal request.
func (w *world) requestRemoval() {
	w.t.Helper()
	if err := w.hubClient.Delete(w.t.Context(), w.cluster()); err != nil {
		w.t.Fatal(err)
	}
	w.patchCluster(`{"metadata":{"annotations":{"` + kube.AnnotationAgentRequest + `":"` + kube.AgentRequestRemove + `"}}}`)
}

func (w *world) addFinalizer() {
	w.t.Helper()
	w.patchCluster(`{"metadata":{"finalizers":["` + clusterv1alpha1.ClusterFinalizer + `"]}}`)
}

func (w *world) wantAnswer() {
	w.t.Helper()
	w.eventually("the hub has the answer", func(ctx context.Context) error {
		lease, err := w.lease(ctx)
		if err == nil && lease.Annotations[kube.AnnotationAgentRequest] != removedAnswer {
			err = errors.New("the Lease has no answer")
		}
		return err
	})
}

// agentObjects returns the agent's objects on the member.
func (w *world) agentObjects() []client.Object {
	return []client.Object{
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.agentNamespace, Name: register.KubeconfigSecret}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.agentNamespace, Name: register.AgentServiceAccount}},
		&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: w.agentNamespace, Name: register.DefaultAgentDeployment}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.agentNamespace}},
	}
}

// agentRoles returns the ClusterRole and the ClusterRoleBinding of the agent.
func (w *world) agentRoles() []client.Object {
	name := register.AgentRole(w.agentNamespace)
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}},
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}},
	}
}

func TestUninstall(t *testing.T) {
	t.Parallel()
	t.Run("after any interruption", testInterruptedUninstall)
	t.Run("without a namespace in use", testNamespaceInUse)
	t.Run("only on request", testNoUninstall)
}

func testInterruptedUninstall(t *testing.T) {
	for writes, finished := 0, false; !finished; writes++ {
		if writes > 14 {
			t.Fatal("the uninstallation takes too many writes")
		}
		w := newWorld(t, fmt.Sprintf("cut%d", writes), time.Hour)
		account := w.installAgent()
		w.addFinalizer()
		cut := newWriteLimiter(writes)
		ended, stop, _ := w.startAgent(func(o *Options) { o.Member = cut.wrap(account) })
		w.wantReady()
		cut.activate()
		w.requestRemoval()
		select {
		case <-cut.refused:
			stop()
			_, stop, _ = w.startAgent(func(o *Options) { o.Member = account })
		case err := <-ended:
			finished = true
			if err != nil {
				t.Error(err)
			}
		}
		w.wantAnswer()
		for _, obj := range append(w.agentObjects(), w.agentRoles()...) {
			w.wantDeleted(w.memberClient, obj)
		}
		w.wantDeleted(w.memberClient, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.options.ClusterNamespace}})
		stop()
		w.patchCluster(`{"metadata":{"finalizers":null}}`)
	}
}

func testNamespaceInUse(t *testing.T) {
	w := newWorld(t, "inuse", time.Hour)
	account := w.installAgent()
	w.addFinalizer()
	unrelated := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.agentNamespace, Name: "unrelated"}}
	if err := w.memberClient.Create(t.Context(), unrelated); err != nil {
		t.Fatal(err)
	}
	ended, _, _ := w.startAgent(func(o *Options) { o.Member = account })
	w.wantReady()
	w.requestRemoval()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	w.wantAnswer()
	for _, obj := range append(w.agentObjects()[:3], w.agentRoles()...) {
		w.wantDeleted(w.memberClient, obj)
	}
	if err := w.memberClient.Get(t.Context(), client.ObjectKeyFromObject(unrelated), unrelated); err != nil || unrelated.DeletionTimestamp != nil {
		t.Errorf("foreign ConfigMap: %v", err)
	}
	w.patchCluster(`{"metadata":{"finalizers":null}}`)
}

func testNoUninstall(t *testing.T) {
	w := newWorld(t, "kept", time.Hour)
	w.installAgent()
	w.addFinalizer()
	w.startAgent()
	w.wantReady()
	untouched := func(when string) {
		t.Helper()
		w.letPass(2 * time.Second)
		for _, obj := range append(w.agentObjects(), w.agentRoles()...) {
			if err := w.memberClient.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil || obj.GetDeletionTimestamp() != nil {
				t.Errorf("%s: %T %s: error %v, owners %v", when, obj, obj.GetName(), err, obj.GetOwnerReferences())
			}
		}
	}
	w.patchCluster(`{"metadata":{"annotations":{"` + kube.AnnotationAgentRequest + `":"` + kube.AgentRequestRemove + `"}}}`)
	untouched("a request on a Cluster that is not being deleted")
	w.patchCluster(`{"metadata":{"annotations":{"` + kube.AnnotationAgentRequest + `":null}}}`)
	if err := w.hubClient.Delete(t.Context(), w.cluster()); err != nil {
		t.Fatal(err)
	}
	untouched("a deletion without a request")
	w.patchCluster(`{"metadata":{"finalizers":null}}`)
	untouched("a missing Cluster")
	err := w.hubClient.Get(t.Context(), client.ObjectKey{Name: w.name}, &clusterv1alpha1.Cluster{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("the Cluster: %v", err)
	}
}
