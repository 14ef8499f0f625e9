package hub_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// registerByKubeconfig registers member with an identity that the registration creates there.
func (w *world) registerByKubeconfig(name string, member *localkube.Plane) *libv1beta1.SveltosCluster {
	w.Helper()
	w.must(join.RegisterPush(w.Context(), w.plane.Config, join.PushRequest{
		Request: join.Request{Namespace: w.ns, Name: name}, Member: member.Config,
	}))
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}}
	w.wantCluster(cluster, func(s libv1beta1.SveltosClusterStatus) bool { return s.Ready && len(cluster.Finalizers) > 0 })
	if cluster.Annotations[join.AnnotationMemberIdentity] != "true" {
		w.Errorf("annotations are %v", cluster.Annotations)
	}
	return cluster
}

func TestKubectlDeleteRemovesIdentityFromPushMember(t *testing.T) {
	w, run := newRestartableWorld(t, "identity")
	run()
	plane := localkube.ForTest(t, localkube.Named("member"))
	member, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	w.must(err)
	one, two := w.registerByKubeconfig("one", plane), w.registerByKubeconfig("two", plane)
	meta := metav1.ObjectMeta{Name: "projectsveltos"}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: "projectsveltos"}}
	identity := []client.Object{&rbacv1.ClusterRole{ObjectMeta: meta}, &rbacv1.ClusterRoleBinding{ObjectMeta: meta}, account}

	w.must(w.Delete(t.Context(), one))
	w.wantClusterDeleted("one")
	for _, obj := range identity {
		w.must(member.Get(t.Context(), client.ObjectKeyFromObject(obj), obj))
	}
	secret := &corev1.Secret{}
	w.eventually("deletion of its kubeconfig", func() error { return w.checkNotFound(secret, w.ns, join.KubeconfigSecret("one")) })
	w.must(w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: join.KubeconfigSecret("two")}, secret))
	// The other cluster still has its own token: the next health check succeeds.
	update(w, two, func(c *libv1beta1.SveltosCluster) { c.Labels["projectsveltos.io/k8s-version"] = "unknown" })
	w.wantCluster(two, func(s libv1beta1.SveltosClusterStatus) bool {
		return s.ConnectionStatus == libv1beta1.ConnectionHealthy && two.Labels["projectsveltos.io/k8s-version"] != "unknown"
	})

	w.must(w.Delete(t.Context(), two))
	w.wantClusterDeleted("two")
	w.eventually("deletion of the identity on the member", func() error {
		for _, obj := range identity {
			if err := member.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); client.IgnoreNotFound(err) != nil || err == nil {
				return fmt.Errorf("%T: got error %w, want not found", obj, err)
			}
		}
		return nil
	})
	w.must(member.Get(t.Context(), client.ObjectKey{Name: kube.AgentNamespace}, &corev1.Namespace{}))
}
