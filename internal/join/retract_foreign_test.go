package join_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// madeBySveltos makes what the sveltosctl of Sveltos makes for a pull-mode cluster, and returns it without the
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

func TestDeregisterOfAForeignRegistrationCanBeCutOffAnywhere(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "cut")
	for _, name := range []string{"refused", "answer-lost"} {
		// The SveltosCluster is deleted twice, once as a trial, and then the six objects of the identity.
		for at := range int64(8) {
			cluster := fmt.Sprintf("%s-%d", name, at+1)
			objects := madeBySveltos(t, hubClient, n, cluster)
			r := join.DeregisterRequest{Request: join.Request{Namespace: n, Name: cluster}}
			broken := &fault{at: at + 1, strike: faults[name](nil)}
			_, first := join.Deregister(t.Context(), broken.on(plane.Config), r)
			_, err := join.Deregister(t.Context(), plane.Config, r)
			if err != nil && !errors.Is(err, join.ErrNotRegistered) {
				t.Errorf("%s: %v, after %v", cluster, err, first)
			}
			if there := kindsThere(t, hubClient, objects); len(there) > 0 {
				t.Errorf("%s: left %q, after %v", cluster, there, first)
			}
		}
	}
}

func TestForeignServiceAccountThatAWorkloadUsesStays(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "workload")
	objects := madeBySveltos(t, hubClient, n, "c")
	nightly := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "batch/v1", "kind": "CronJob", "metadata": map[string]any{"namespace": n, "name": "nightly"},
		"spec": map[string]any{"schedule": "0 0 * * *", "jobTemplate": map[string]any{"spec": map[string]any{"template": map[string]any{"spec": map[string]any{
			"serviceAccountName": "c", "restartPolicy": "Never", "containers": []any{map[string]any{"name": "c", "image": "i"}},
		}}}}},
	}}
	if err := hubClient.Create(t.Context(), nightly); err != nil {
		t.Fatal(err)
	}
	r := join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}}
	departure, err := join.Deregister(t.Context(), plane.Config, r)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"ServiceAccount " + n + "/c: CronJob batch " + n + "/nightly uses it; to delete it: kubectl delete serviceaccount c -n " + n,
		"Secret " + n + "/c: it is for a token of ServiceAccount " + n + "/c, which stays; to delete it: kubectl delete secret c -n " + n,
	}
	if diff := cmp.Diff(want, keptTexts(departure.Kept)); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"ServiceAccount", "Secret"}, kindsThere(t, hubClient, objects)); diff != "" {
		t.Errorf("there (-want +got):\n%s", diff)
	}
	if len(departure.Deleted) != 5 {
		t.Errorf("deleted %v, want the SveltosCluster, two roles and two bindings", departure.Deleted)
	}
}

func TestForeignIdentityStaysWhereItsUseCannotBeRead(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "unread")
	objects := madeBySveltos(t, hubClient, n, "c")
	blind := rest.CopyConfig(plane.Config)
	blind.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			if strings.Contains(request.URL.Path, "/clusterrole") {
				return faults["forbidden"](nil)(request, next)
			}
			return next.RoundTrip(request)
		})
	})
	departure, err := join.Deregister(t.Context(), blind, join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}})
	if err != nil {
		t.Fatal(err)
	}
	if len(departure.Kept) != 4 || !strings.Contains(departure.Kept[0].String(), "whether something else uses it is not known") {
		t.Errorf("kept %v", departure.Kept)
	}
	if there := kindsThere(t, hubClient, objects); len(there) != 6 {
		t.Errorf("there is only %q", there)
	}
}

func TestForeignKubeconfigsOfAPushClusterAreListed(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "pushed")
	command := "; to delete it: kubectl delete secret "
	for cluster, test := range map[string]struct{ secret, named, want string }{
		"one": {join.KubeconfigSecret("one"), "", "Towline did not make it" + command},
		"two": {"own", "own", "SveltosCluster " + n + "/other uses it, too" + command},
	} {
		secret := secretNamed(n, test.secret)
		made := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: cluster}}
		made.Spec.KubeconfigName = test.named
		other := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: "other"}}
		other.Spec.KubeconfigName = "own"
		err := errors.Join(hubClient.Create(t.Context(), secret), hubClient.Create(t.Context(), made), client.IgnoreAlreadyExists(hubClient.Create(t.Context(), other)))
		if err != nil {
			t.Fatal(err)
		}
		departure, err := join.Deregister(t.Context(), plane.Config, join.DeregisterRequest{Request: join.Request{Namespace: n, Name: cluster}})
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"Secret " + n + "/" + test.secret + ": " + test.want + test.secret + " -n " + n}
		if diff := cmp.Diff(want, keptTexts(departure.Kept)); diff != "" {
			t.Errorf("%s: kept (-want +got):\n%s", cluster, diff)
		}
		if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(secret), secret); err != nil || len(departure.Deleted) != 1 {
			t.Errorf("%s: error %v, deleted %v", cluster, err, departure.Deleted)
		}
	}
}

func TestDeregisterOfWhatIsNotThereListsWhatHasItsName(t *testing.T) {
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
	want := []string{"ServiceAccount " + n + "/c: nothing shows that it is the agent's; to delete it: kubectl delete serviceaccount c -n " + n}
	if diff := cmp.Diff(want, keptTexts(departure.Kept)); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(account), account); apierrors.IsNotFound(err) {
		t.Error("it is deleted")
	}
}
