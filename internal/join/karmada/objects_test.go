package karmada_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube/faults"
)

func in(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name}
}

// rightsOf are the objects that give the agent of a Cluster its rights.
func rightsOf(name string) []client.Object {
	role, space := "system:karmada:"+name+":agent", "karmada-es-"+name
	of := func(kind string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: role}
	}
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: in("", role)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: in("", role), RoleRef: of("ClusterRole")},
		&rbacv1.Role{ObjectMeta: in(space, role)},
		&rbacv1.RoleBinding{ObjectMeta: in(space, role), RoleRef: of("Role")},
		&rbacv1.RoleBinding{ObjectMeta: in(kube.AgentNamespace, role), RoleRef: of("Role")},
	}
}

// hubObjects are the other objects of a Cluster whose ID is its name, its execution namespace first.
func hubObjects(name string) []client.Object {
	return []client.Object{
		&corev1.Namespace{ObjectMeta: in("", "karmada-es-"+name)},
		&coordinationv1.Lease{ObjectMeta: in("karmada-es-"+name, name)},
		&workv1alpha1.Work{ObjectMeta: in("karmada-es-"+name, "w")},
		&corev1.ConfigMap{ObjectMeta: in("karmada-cluster", "cluster-id-"+name), Data: map[string]string{"cluster": name, "id": name}},
		&corev1.Secret{ObjectMeta: in("karmada-cluster", name)},
		&corev1.Secret{ObjectMeta: in("karmada-cluster", name+"-impersonator")},
	}
}

// foreignObjects are objects of others that have the labels of a Cluster.
func foreignObjects(name string) []client.Object {
	role := "system:karmada:" + name + ":agent"
	return []client.Object{
		&rbacv1.ClusterRole{ObjectMeta: in("", name+"-reader")},
		&rbacv1.ClusterRoleBinding{ObjectMeta: in("", name+"-reader"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}},
		&rbacv1.Role{ObjectMeta: in("default", role)},
		&rbacv1.Role{ObjectMeta: in(kube.AgentNamespace, role)},
		&rbacv1.RoleBinding{ObjectMeta: in("default", role), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role}},
		&corev1.Secret{ObjectMeta: in("default", name)},
		&corev1.ConfigMap{ObjectMeta: in("default", name)},
		&corev1.Namespace{ObjectMeta: in("", name+"-theirs")},
	}
}

// put creates objects that bear the labels of a Cluster.
func (w *world) put(t *testing.T, of string, objects ...client.Object) {
	t.Helper()
	for _, obj := range objects {
		karmada.SetOwnerLabels(obj, of)
		if err := w.hubClient.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
}

// namespaces makes those that every hub has.
func (w *world) namespaces(t *testing.T) {
	t.Helper()
	for _, name := range []string{kube.AgentNamespace, "karmada-cluster"} {
		if err := client.IgnoreAlreadyExists(w.hubClient.Create(t.Context(), &corev1.Namespace{ObjectMeta: in("", name)})); err != nil {
			t.Fatal(err)
		}
	}
}

// want wants objects to be there, or not to be there.
func (w *world) want(t *testing.T, when string, there bool, objects []client.Object) {
	t.Helper()
	for _, obj := range objects {
		live := obj.DeepCopyObject().(client.Object)
		err := w.hubClient.Get(t.Context(), client.ObjectKeyFromObject(obj), live)
		if client.IgnoreNotFound(err) != nil {
			t.Fatal(err)
		}
		if got := err == nil && live.GetUID() == obj.GetUID() && live.GetDeletionTimestamp().IsZero(); got != there {
			t.Errorf("%s: %T %s is there: %t, want %t", when, obj, client.ObjectKeyFromObject(obj), got, there)
		}
	}
}

// created makes a Cluster whose id is its name.
func (w *world) created(t *testing.T, name string) *clusterv1alpha1.Cluster {
	t.Helper()
	c := cluster(name, name)
	if err := w.hubClient.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestLeftoverRBACBelongsToDeletedClusters(t *testing.T) {
	w := alone(t)
	w.namespaces(t)
	w.created(t, "swept-living")
	var kept []client.Object
	for _, name := range []string{"swept-gone", "swept-living"} {
		others := append(hubObjects(name), foreignObjects(name)...)
		w.put(t, name, others...)
		kept = append(kept, others...)
	}
	own := rightsOf("swept-living")
	w.put(t, "swept-living", own...)
	// Somebody else's under the name that a right would have.
	unmarked := rightsOf("swept-unmarked")[:2]
	for _, obj := range unmarked {
		if err := w.hubClient.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	kept = append(append(kept, own...), unmarked...)
	tests := map[string]func() error{
		"DeleteLeftoverRBAC": func() error {
			var errs []error
			for _, name := range []string{"swept-gone", "swept-living", "swept-unmarked", strings.Repeat("a", 100)} {
				errs = append(errs, karmada.DeleteLeftoverRBAC(t.Context(), w.hubClient, name))
			}
			return errors.Join(errs...)
		},
		"DeleteAllLeftoverRBAC": func() error { return karmada.DeleteAllLeftoverRBAC(t.Context(), w.hubClient) },
	}
	for when, sweep := range tests {
		leftover := rightsOf("swept-gone")
		w.put(t, "swept-gone", leftover...)
		if err := sweep(); err != nil {
			t.Fatal(err)
		}
		w.want(t, when, false, leftover)
		w.want(t, when, true, kept)
	}
}

func TestDeleteHubObjectsDeletesOnlyOwnedObjects(t *testing.T) {
	w := alone(t)
	w.namespaces(t)
	c := cluster("taken-off", "taken-off")
	c.Spec.SecretRef = &clusterv1alpha1.LocalSecretReference{Namespace: "default", Name: "token-of-taken-off"}
	if err := w.hubClient.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	own := append(hubObjects("taken-off"), &corev1.Secret{ObjectMeta: in("default", "token-of-taken-off")})
	w.put(t, c.Name, own...)
	rights := rightsOf("taken-off")
	w.put(t, c.Name, rights...)
	theirs := foreignObjects("taken-off")
	w.put(t, c.Name, theirs...)
	if err := karmada.DeleteHubObjects(t.Context(), w.hubClient, c); err != nil {
		t.Fatal(err)
	}
	// The Work goes with its namespace.
	w.want(t, "removed", false, append(rights, own[0], own[1], own[3], own[4], own[5], own[6]))
	w.want(t, "removed", true, theirs)
}

func TestRestoredClusterKeepsItsID(t *testing.T) {
	w := alone(t)
	w.namespaces(t)
	c := w.created(t, "claim-restored")
	claim := &corev1.ConfigMap{ObjectMeta: in("karmada-cluster", "cluster-id-"+c.Name), Data: map[string]string{"cluster": c.Name, "id": c.Name}}
	w.put(t, c.Name, claim)
	second := cluster("claim-rival", c.Name)
	if err := w.hubClient.Create(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	if err := karmada.ReserveID(t.Context(), w.hubClient, second); !errors.Is(err, karmada.ErrAlreadyRegistered) {
		t.Errorf("another Cluster of that id: got %v, want ErrAlreadyRegistered", err)
	}
	if err := karmada.ReserveID(t.Context(), w.hubClient, c); err != nil {
		t.Error(err)
	}
	// The reservation of a deleted Cluster can be replaced.
	if err := w.hubClient.Delete(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := karmada.ReserveID(t.Context(), w.hubClient, second); err != nil {
		t.Errorf("when the Cluster is gone: %v", err)
	}
}

func TestForcedUnjoinLeavesForbiddenObjects(t *testing.T) {
	w := alone(t)
	w.namespaces(t)
	c := cluster("barred", "barred")
	c.Spec.SyncMode, c.Finalizers = clusterv1alpha1.Push, []string{clusterv1alpha1.ClusterFinalizer}
	if err := w.hubClient.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	w.put(t, c.Name, hubObjects("barred")...)
	w.put(t, c.Name, rightsOf("barred")...)
	hub := rest.CopyConfig(w.hub.Config)
	hub.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			path := request.URL.Path
			if strings.Contains(path, "clusters/barred") || strings.HasSuffix(path, "/works") || strings.Contains(path, "/works/") ||
				strings.HasSuffix(path, "clustersummaries") || strings.HasSuffix(path, "/apis") || strings.HasSuffix(path, "/api") {
				return next.RoundTrip(request)
			}
			if _, resource, _ := strings.Cut(path, "/v1"); !strings.Contains(strings.TrimPrefix(resource, "/"), "/") {
				return next.RoundTrip(request) // the kinds of the hub
			}
			text := `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","message":"forbidden","code":403}`
			return &http.Response{
				StatusCode: http.StatusForbidden, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(text)), Request: request,
			}, nil
		})
	})
	if err := karmada.Unjoin(t.Context(), karmada.UnjoinRequest{Hub: hub, Name: "barred", Force: true, Timeout: time.Second, Progress: func(string) {}}); err != nil {
		t.Fatal(err)
	}
	if err := w.hubClient.Get(t.Context(), client.ObjectKeyFromObject(c), c); !apierrors.IsNotFound(err) {
		t.Errorf("the Cluster: got %v, want not found", err)
	}
}
