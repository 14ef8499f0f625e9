package join_test

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// madeBySveltos creates the objects of Sveltos's sveltosctl for a pull-mode cluster, and returns them without the
// namespace.
func madeBySveltos(t *testing.T, hubClient client.Client, namespace, cluster string) []*unstructured.Unstructured {
	t.Helper()
	raw, err := os.ReadFile("testdata/sveltos-registration.yaml")
	if err != nil {
		t.Fatal(err)
	}
	objects, err := kube.DecodeManifest([]byte(strings.NewReplacer("NAMESPACE", namespace, "CLUSTER", cluster).Replace(string(raw))))
	if err != nil {
		t.Fatal(err)
	}
	objects = slices.DeleteFunc(objects, func(obj *unstructured.Unstructured) bool { return obj.GetKind() == "Namespace" })
	for _, obj := range objects {
		if err := hubClient.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	return objects
}

// kindsThere lists the kinds of the objects that exist.
func kindsThere(t *testing.T, hubClient client.Client, objects []*unstructured.Unstructured) []string {
	t.Helper()
	var there []string
	for _, obj := range objects {
		err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(obj), obj.DeepCopy())
		if client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		if err == nil {
			there = append(there, obj.GetKind())
		}
	}
	return there
}

func keptTexts(kept []join.Kept) []string {
	var all []string
	for _, k := range kept {
		all = append(all, k.String())
	}
	return all
}

func TestObjectsThatSveltosCreatedStay(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "foreign")
	objects := madeBySveltos(t, hubClient, n, "c")
	departure, err := join.Deregister(t.Context(), plane.Config, join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}})
	if err != nil {
		t.Fatal(err)
	}
	const reason = ": Towline did not create it; to delete it: kubectl delete "
	want := []string{
		"Secret " + n + "/c" + reason + "secret c -n " + n,
		"ClusterRole rbac.authorization.k8s.io " + n + "-c" + reason + "clusterrole " + n + "-c",
		"ClusterRoleBinding rbac.authorization.k8s.io " + n + "-c" + reason + "clusterrolebinding " + n + "-c",
		"RoleBinding rbac.authorization.k8s.io " + n + "/c" + reason + "rolebinding c -n " + n,
		"Role rbac.authorization.k8s.io " + n + "/c" + reason + "role c -n " + n,
		"ServiceAccount " + n + "/c" + reason + "serviceaccount c -n " + n,
	}
	if diff := cmp.Diff(want, keptTexts(departure.Kept)); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
	there := []string{"ServiceAccount", "Secret", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
	if diff := cmp.Diff(there, kindsThere(t, hubClient, objects)); diff != "" {
		t.Errorf("there (-want +got):\n%s", diff)
	}
	if len(departure.Deleted) != 1 {
		t.Errorf("deleted %v, want the SveltosCluster", departure.Deleted)
	}
}

func TestForeignKubeconfigsOfAPushClusterAreListed(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "pushed")
	for cluster, test := range map[string]struct{ secret, named string }{
		"one": {join.KubeconfigSecret("one"), ""},
		"two": {"own", "own"},
	} {
		secret := secretNamed(n, test.secret)
		made := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: cluster}}
		made.Spec.KubeconfigName = test.named
		if err := errors.Join(hubClient.Create(t.Context(), secret), hubClient.Create(t.Context(), made)); err != nil {
			t.Fatal(err)
		}
		departure, err := join.Deregister(t.Context(), plane.Config, join.DeregisterRequest{Request: join.Request{Namespace: n, Name: cluster}})
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"Secret " + n + "/" + test.secret + ": Towline did not create it; to delete it: kubectl delete secret " + test.secret + " -n " + n}
		if diff := cmp.Diff(want, keptTexts(departure.Kept)); diff != "" {
			t.Errorf("%s: kept (-want +got):\n%s", cluster, diff)
		}
		if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(secret), secret); err != nil || len(departure.Deleted) != 1 {
			t.Errorf("%s: error %v, deleted %v", cluster, err, departure.Deleted)
		}
	}
}

func TestDeregisterOfUnknownClusterListsKeptObjects(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "nothing")
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: "c"}}
	if err := hubClient.Create(t.Context(), account); err != nil {
		t.Fatal(err)
	}
	departure, err := join.Deregister(t.Context(), plane.Config, join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}})
	if !errors.Is(err, join.ErrNotRegistered) {
		t.Errorf("got error %v, want ErrNotRegistered", err)
	}
	want := []string{"ServiceAccount " + n + "/c: Towline did not create it; to delete it: kubectl delete serviceaccount c -n " + n}
	if diff := cmp.Diff(want, keptTexts(departure.Kept)); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(account), account); apierrors.IsNotFound(err) {
		t.Error("it is deleted")
	}
}
