package join_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// kinds lists the kinds of a control plane.
func kinds(t *testing.T, plane *localkube.Plane) foreign.Resources {
	t.Helper()
	return discovery.NewDiscoveryClientForConfigOrDie(plane.Config)
}

// pointed makes a pull-mode SveltosCluster whose annotation names a delivery namespace.
func pointed(t *testing.T, hubClient client.Client, namespace, delivery string) *libv1beta1.SveltosCluster {
	t.Helper()
	cluster := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "prod", Annotations: map[string]string{kube.AnnotationDeliveryNS: delivery}},
		Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	if err := hubClient.Create(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	return cluster
}

// group puts a delivery for a cluster into a namespace.
func group(t *testing.T, hubClient client.Client, namespace, cluster string) *libv1beta1.ConfigurationGroup {
	t.Helper()
	group := &libv1beta1.ConfigurationGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "g-" + cluster, Labels: map[string]string{libv1beta1.PullClusterNameLabel: cluster}},
		Spec:       libv1beta1.ConfigurationGroupSpec{Action: libv1beta1.ActionDeploy},
	}
	if err := hubClient.Create(t.Context(), group); err != nil {
		t.Fatal(err)
	}
	return group
}

// Two tenants, each of whom may write everything in a namespace of his own.
func TestATenantReachesNoOtherTenantsDeliveries(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	mine, theirs := newNamespace(t, hubClient, "mine"), newNamespace(t, hubClient, "theirs")
	registered(t, plane, pullRequest(theirs, "first"))
	registered(t, plane, pullRequest(theirs, "prod"))
	delivery := theirs + "--prod"
	waiting := group(t, hubClient, delivery, "prod")
	before := versions(t, hubClient, delivery, theirs)

	cluster := pointed(t, hubClient, mine, delivery)
	_, err := join.Establish(t.Context(), hubClient, cluster)
	wantText(t, err, "annotation towline.dev/delivery-namespace names namespace "+delivery+", which is not the cluster's")
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(cluster), &corev1.ServiceAccount{}); !apierrors.IsNotFound(err) {
		t.Errorf("an identity was made: %v", err)
	}
	if _, err := join.DeleteHubObjects(t.Context(), hubClient, kinds(t, plane), cluster); err != nil {
		t.Fatal(err)
	}
	// After the deletion of the cluster, the annotations of a ServiceAccount must not be trusted, either.
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{
		Namespace: mine, Name: "prod", Labels: map[string]string{"towline.dev/registration": "prod"}, Annotations: cluster.Annotations,
	}}
	if err := errors.Join(hubClient.Delete(t.Context(), cluster), hubClient.Create(t.Context(), account)); err != nil {
		t.Fatal(err)
	}
	if _, err := join.Deregister(t.Context(), plane.Config, join.DeregisterRequest{Request: join.Request{Namespace: mine, Name: "prod"}}); err != nil {
		t.Fatal(err)
	}
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(waiting), waiting); err != nil || waiting.DeletionTimestamp != nil {
		t.Errorf("the other tenant's delivery is gone: %v", err)
	}
	for name, version := range versions(t, hubClient, delivery, theirs) {
		if before[name] != version {
			t.Errorf("%s of the other tenant was changed", name)
		}
	}
}

func TestNothingIsCreatedInForeignNamespaces(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	for _, delivery := range []string{kube.AgentNamespace, "kube-system", "not-there-yet"} {
		cluster := pointed(t, hubClient, newNamespace(t, hubClient, "points"), delivery)
		_, err := join.Establish(t.Context(), hubClient, cluster)
		wantText(t, err, "which is not the cluster's")
		for _, obj := range []client.Object{&coordinationv1.Lease{}, &corev1.ServiceAccount{}} {
			err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: delivery, Name: "prod"}, obj)
			if !apierrors.IsNotFound(err) {
				t.Errorf("%T in %s: %v", obj, delivery, err)
			}
		}
	}
}

func TestANamespaceOfOthersIsNotClaimed(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	n := newNamespace(t, hubClient, "squat")
	foreignNamespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n + "--two"}}
	if err := hubClient.Create(t.Context(), foreignNamespace); err != nil {
		t.Fatal(err)
	}
	established(t, hubClient, declared(t, hubClient, n, "one"))
	_, err := join.Establish(t.Context(), hubClient, declared(t, hubClient, n, "two"))
	wantText(t, err, "namespace "+n+"--two, which the deliveries of the cluster need, exists and was not made by a registration")
	if !errors.Is(err, join.ErrForeign) {
		t.Errorf("error %v, want ErrForeign", err)
	}
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(foreignNamespace), foreignNamespace); err != nil || foreignNamespace.Annotations[kube.AnnotationDeliveryHolder] != "" {
		t.Errorf("the namespace is claimed: annotations %v, error %v", foreignNamespace.Annotations, err)
	}
}

func TestDeleteHubObjectsKeepsANamespaceWithForeignObjects(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "keeps")
	established(t, hubClient, declared(t, hubClient, n, "first"))
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
	}}
	own := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "leader"}}
	for name, users := range map[string]client.Object{"claim": claim, "lease": own, "free": nil} {
		cluster := declared(t, hubClient, n, name)
		delivery := established(t, hubClient, cluster)
		if users != nil {
			users.SetNamespace(delivery)
			if err := hubClient.Create(t.Context(), users); err != nil {
				t.Fatal(err)
			}
		}
		done, err := join.DeleteHubObjects(t.Context(), hubClient, kinds(t, plane), cluster)
		if err != nil {
			t.Fatal(err)
		}
		gone := slices.Contains(done.Deleted, kube.Ref{Version: "v1", Kind: "Namespace", Name: delivery})
		if gone != (users == nil) {
			t.Errorf("%s: the namespace goes: %t", name, gone)
		}
		namespace := &corev1.Namespace{}
		if err := hubClient.Get(t.Context(), client.ObjectKey{Name: delivery}, namespace); err == nil && !gone && namespace.Annotations[kube.AnnotationDeliveryHolder] != "" {
			t.Errorf("%s: it is still claimed", name)
		}
	}
}

func TestFailedRegistrationKeepsANamespaceWithForeignObjects(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "undo")
	registered(t, plane, pullRequest(n, "first"))
	users := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: n + "--second", Name: "users"}, Spec: corev1.ServiceSpec{ExternalName: "x.example.com", Type: corev1.ServiceTypeExternalName}}
	out := outlet(func([]byte) (int, error) {
		return 0, errors.Join(errors.New("broken pipe"), hubClient.Create(t.Context(), users))
	})
	wantText(t, join.RegisterPull(t.Context(), plane.Config, pullRequest(n, "second"), out), "broken pipe")
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(users), users); err != nil {
		t.Error(err)
	}
	namespace := &corev1.Namespace{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Name: users.Namespace}, namespace); err != nil || namespace.DeletionTimestamp != nil {
		t.Errorf("the namespace goes: %v", err)
	}
	if namespace.Annotations[kube.AnnotationDeliveryHolder] != "" {
		t.Errorf("it is still claimed")
	}
}

type outlet func([]byte) (int, error)

func (w outlet) Write(p []byte) (int, error) { return w(p) }

func TestALongNameIsRefusedAndHoldsNothingUp(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "long")
	cluster := declared(t, hubClient, n, strings.Repeat("a", 64))
	_, err := join.Establish(t.Context(), hubClient, cluster)
	wantText(t, err, "metadata.name: the name of a cluster in pull mode may have 63 characters at most")
	if done, err := join.DeleteHubObjects(t.Context(), hubClient, kinds(t, plane), cluster); err != nil || len(done.Deleted) > 0 {
		t.Errorf("deleted %v, err %v", done.Deleted, err)
	}
}

func TestALeaseOfOthersIsNotTaken(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := newNamespace(t, hubClient, "foreign")
	users := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: "c"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("x")}}
	if err := hubClient.Create(t.Context(), users); err != nil {
		t.Fatal(err)
	}
	cluster := declared(t, hubClient, n, "c")
	if _, err := join.Establish(t.Context(), hubClient, cluster); !errors.Is(err, join.ErrForeign) {
		t.Errorf("got error %v, want ErrForeign", err)
	}
	if _, err := join.DeleteHubObjects(t.Context(), hubClient, kinds(t, plane), cluster); err != nil {
		t.Fatal(err)
	}
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(users), users); err != nil || len(users.Labels) > 0 {
		t.Errorf("it is changed: %v %v", users.Labels, err)
	}
}
