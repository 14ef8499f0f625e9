package hub_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/kube"
)

// madeBySveltos makes what the sveltosctl of Sveltos makes for a pull-mode cluster, and waits until the hub holds the
// cluster.
func (w *world) madeBySveltos(name string) *libv1beta1.SveltosCluster {
	w.Helper()
	raw, err := os.ReadFile("../join/testdata/sveltos-registration.yaml")
	w.must(err)
	objects, err := kube.DecodeManifest([]byte(strings.NewReplacer("NAMESPACE", w.ns, "CLUSTER", name).Replace(string(raw))))
	w.must(err)
	for _, obj := range objects {
		if obj.GetKind() != "Namespace" {
			w.create(obj)
		}
	}
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}}
	w.wantMessage(cluster, "registering: ServiceAccount "+w.ns+"/"+name+" exists and was not made by a registration")
	return cluster
}

// identityOf lists the identity that the sveltosctl of Sveltos makes for a cluster.
func (w *world) identityOf(name string) []client.Object {
	inside, everywhere := metav1.ObjectMeta{Namespace: w.ns, Name: name}, metav1.ObjectMeta{Name: w.ns + "-" + name}
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: inside}, &corev1.Secret{ObjectMeta: inside}, &rbacv1.Role{ObjectMeta: inside}, &rbacv1.RoleBinding{ObjectMeta: inside},
		&rbacv1.ClusterRole{ObjectMeta: everywhere}, &rbacv1.ClusterRoleBinding{ObjectMeta: everywhere},
	}
}

// TestKubectlDeleteTakesTheIdentityThatSveltosMade runs the hub with no more rights than it has when it is installed.
func TestKubectlDeleteTakesTheIdentityThatSveltosMade(t *testing.T) {
	w := realWorld(t)
	w.start(w.installed(), hub.Options{InstallCRDs: true, CacheDir: t.TempDir()})
	w.eventually("CRDs", func() error { return w.List(t.Context(), &libv1beta1.SveltosClusterList{}) })
	one, two := w.madeBySveltos("one"), w.madeBySveltos("two")
	w.must(w.Delete(t.Context(), one))
	w.wantClusterGone("one")
	w.wantNone(w.identityOf("one"))
	w.wantAll(w.identityOf("two"))

	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "p"}, Spec: corev1.PodSpec{
		ServiceAccountName: "two", Containers: []corev1.Container{{Name: "c", Image: "i"}},
	}}
	w.create(pod)
	w.must(w.Delete(t.Context(), two))
	w.wantClusterGone("two")
	w.wantAll(w.identityOf("two")[:2])
	w.wantNone(w.identityOf("two")[2:])
	want := []string{
		"Secret %[1]s/two: it is for a token of ServiceAccount %[1]s/two, which stays; to delete it: kubectl delete secret two -n %[1]s",
		"ServiceAccount %[1]s/two: Pod %[1]s/p uses it; to delete it: kubectl delete serviceaccount two -n %[1]s",
	}
	for n := range want {
		want[n] = fmt.Sprintf("Warning LeftBehind stays on the hub: "+want[n], w.ns)
	}
	w.eventually("events", func() error {
		others := func(text string) bool { return !strings.HasPrefix(text, "Warning LeftBehind") }
		return same(want, slices.DeleteFunc(w.events(two), others))
	})
}
