package hub_test

import (
	"fmt"
	"os"
	"reflect"
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

// registerWithSveltosctl creates the objects of Sveltos' sveltosctl for a pull-mode cluster, and waits until the hub
// reports that they exist.
func (w *world) registerWithSveltosctl(name string) *libv1beta1.SveltosCluster {
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

// identityObjects lists the objects of the identity that Sveltos' sveltosctl creates for a cluster.
func (w *world) identityObjects(name string) []client.Object {
	inside, everywhere := metav1.ObjectMeta{Namespace: w.ns, Name: name}, metav1.ObjectMeta{Name: w.ns + "-" + name}
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: inside}, &corev1.Secret{ObjectMeta: inside}, &rbacv1.Role{ObjectMeta: inside}, &rbacv1.RoleBinding{ObjectMeta: inside},
		&rbacv1.ClusterRole{ObjectMeta: everywhere}, &rbacv1.ClusterRoleBinding{ObjectMeta: everywhere},
	}
}

// TestKubectlDeleteKeepsIdentityOfSveltos runs the hub with the permissions of config/hub.yaml.
func TestKubectlDeleteKeepsIdentityOfSveltos(t *testing.T) {
	w := newPrivateWorld(t)
	w.start(w.installHub(), hub.Options{InstallCRDs: true, CacheDir: t.TempDir()})
	w.eventually("CRDs", func() error { return w.List(t.Context(), &libv1beta1.SveltosClusterList{}) })
	one := w.registerWithSveltosctl("one")
	w.must(w.Delete(t.Context(), one))
	w.wantClusterDeleted("one")
	w.wantObjects(w.identityObjects("one"))
	w.eventually("events", func() error {
		events := w.listEvents(one)
		for _, obj := range w.identityObjects("one") {
			kind := strings.ToLower(reflect.TypeOf(obj).Elem().Name())
			want := "Towline did not create it; to delete it: kubectl delete " + kind + " " + obj.GetName()
			isListed := func(text string) bool {
				return strings.HasPrefix(text, "Warning LeftBehind stays on the hub: ") && strings.Contains(text, want)
			}
			if !slices.ContainsFunc(events, isListed) {
				return fmt.Errorf("the events are %q, want %q", events, want)
			}
		}
		return nil
	})
}
