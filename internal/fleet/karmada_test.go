package fleet_test

import (
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

func condition(status metav1.ConditionStatus, reason, message string) clusterv1alpha1.ClusterStatus {
	return clusterv1alpha1.ClusterStatus{
		KubernetesVersion: "v1.34.0",
		Conditions:        []metav1.Condition{{Type: clusterv1alpha1.ClusterConditionReady, Status: status, Reason: reason, Message: message}},
	}
}

func TestFromCluster(t *testing.T) {
	t.Parallel()
	pull := clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull}
	push := clusterv1alpha1.ClusterSpec{
		SyncMode: clusterv1alpha1.Push, APIEndpoint: "https://h", SecretRef: &clusterv1alpha1.LocalSecretReference{Namespace: "creds", Name: "one"},
		ProxyURL: "http://p", ProxyHeader: map[string]string{"A": "b"}, InsecureSkipTLSVerification: true,
	}
	now := metav1.Now()
	tests := map[string]struct {
		cluster clusterv1alpha1.Cluster
		want    func(*fleet.Member)
	}{
		"pull": {clusterv1alpha1.Cluster{Spec: pull}, func(*fleet.Member) {}},
		"push": {clusterv1alpha1.Cluster{Spec: push}, func(m *fleet.Member) {
			m.Mode, m.DeliveryNamespace, m.MemberNamespace = fleet.Push, "", "creds"
			m.Access = &fleet.Access{
				Server: "https://h", ProxyURL: "http://p", ProxyHeader: map[string]string{"A": "b"}, Insecure: true,
				Secret: types.NamespacedName{Namespace: "creds", Name: "one"},
			}
		}},
		"ready": {clusterv1alpha1.Cluster{Spec: pull, Status: condition(metav1.ConditionTrue, "ClusterReady", "fine")}, func(m *fleet.Member) {
			m.Ready, m.KubernetesVersion = true, "v1.34.0"
		}},
		"down": {clusterv1alpha1.Cluster{Spec: pull, Status: condition(metav1.ConditionUnknown, "ClusterStatusUnknown", "silent")}, func(m *fleet.Member) {
			m.Ready, m.Down, m.DownMessage, m.KubernetesVersion = true, true, "silent", "v1.34.0"
		}},
		"never reached": {clusterv1alpha1.Cluster{Spec: pull, Status: clusterv1alpha1.ClusterStatus{}}, func(*fleet.Member) {}},
		"a taken id is refused": {clusterv1alpha1.Cluster{Spec: pull, Status: condition(metav1.ConditionFalse, fleet.ReasonIDTaken, "taken")}, func(m *fleet.Member) {
			m.Ready, m.Down, m.DownMessage, m.KubernetesVersion, m.Refused = true, true, "taken", "v1.34.0", "taken"
		}},
		"a status does not refuse a deleted Cluster": {
			clusterv1alpha1.Cluster{
				ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}, Spec: pull, Status: condition(metav1.ConditionFalse, fleet.ReasonIDTaken, "taken"),
			},
			func(m *fleet.Member) {
				m.Ready, m.Down, m.DownMessage, m.KubernetesVersion, m.Deleting = true, true, "taken", "v1.34.0", true
			},
		},
		"held once it bears the mark of a hub": {
			clusterv1alpha1.Cluster{
				ObjectMeta: metav1.ObjectMeta{Finalizers: []string{clusterv1alpha1.ClusterFinalizer}, Annotations: map[string]string{kube.AnnotationHub: "h"}}, Spec: pull,
			},
			func(m *fleet.Member) { m.HasFinalizer, m.Hub = true, "h" },
		},
		"not held without": {
			clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Finalizers: []string{clusterv1alpha1.ClusterFinalizer}}, Spec: pull}, func(*fleet.Member) {},
		},
		"leaving": {
			clusterv1alpha1.Cluster{
				ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now, Annotations: map[string]string{kube.AnnotationDeregister: "keep-addons,abandon"}}, Spec: pull,
			},
			func(m *fleet.Member) { m.Deleting, m.KeepAddons, m.Abandoned = true, true, true },
		},
		"a shard and APIs": {
			clusterv1alpha1.Cluster{
				ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{libv1beta1.ShardAnnotation: "s1"}}, Spec: pull,
				Status: clusterv1alpha1.ClusterStatus{APIEnablements: []clusterv1alpha1.APIEnablement{
					{GroupVersion: "v1", Resources: []clusterv1alpha1.APIResource{{Name: "pods", Kind: "Pod"}}},
				}},
			},
			func(m *fleet.Member) {
				m.Shard, m.CacheMayLackObjects, m.APIVersions = "s1", true, []string{"v1", "v1/Pod"}
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.cluster.Name, tc.cluster.UID = "one", "u"
			want := fleet.Member{
				Type: fleet.TypeKarmada, Namespace: "karmada-es-one", Name: "one", Mode: fleet.Pull, DeliveryNamespace: "karmada-es-one",
				MemberNamespace: "karmada-cluster", Scope: "u", UID: "u",
			}
			tc.want(&want)
			if diff := cmp.Diff(want, fleet.FromObject(&tc.cluster)); diff != "" {
				t.Errorf("Of() (-want +got):\n%s", diff)
			}
		})
	}
}

func TestExecutionSpacesAreForClusters(t *testing.T) {
	t.Parallel()
	m := fleet.FromObject(&libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-one", Name: "one"}})
	if m.Refused == "" || !fleet.IsRefusal(m.Refused) {
		t.Errorf("a SveltosCluster in an execution space is refused for %q", m.Refused)
	}
}

// The fake reader replaces the cache, because the test checks only the keys of the requests.
func TestGetAndListReadBothKinds(t *testing.T) {
	t.Parallel()
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithObjects(
		&libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "eu", Name: "one"}},
		&libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "af", Name: "two"}},
		&clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "one"}},
	).Build()
	members, err := fleet.List(t.Context(), hub)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range members {
		ids = append(ids, m.ID().String())
		got, obj, err := fleet.Get(t.Context(), hub, m.Type, m.Namespace, m.Name)
		if err != nil || got.ID() != m.ID() || obj.GetName() != m.Name {
			t.Errorf("Get(%s) = %v, %v, %v", m.ID(), got.ID(), obj, err)
		}
	}
	if diff := cmp.Diff([]string{"Karmada karmada-es-one/one", "Sveltos af/two", "Sveltos eu/one"}, ids); diff != "" {
		t.Errorf("List() (-want +got):\n%s", diff)
	}
	for _, id := range []fleet.ID{
		{Type: fleet.TypeKarmada, Namespace: "eu", Name: "one"}, {Type: fleet.TypeKarmada, Namespace: "karmada-es-two", Name: "two"},
		{Type: "Capi", Namespace: "eu", Name: "one"}, {Namespace: "eu", Name: "one"}, {Type: fleet.TypeSveltos, Namespace: "karmada-es-one", Name: "one"},
	} {
		if _, _, err := fleet.Get(t.Context(), hub, id.Type, id.Namespace, id.Name); !apierrors.IsNotFound(err) {
			t.Errorf("Get(%s): error = %v", id, err)
		}
	}
}

func TestWithoutVolatileFields(t *testing.T) {
	t.Parallel()
	base := clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Name: "one", Labels: map[string]string{"env": "prod"}}, Spec: clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull},
		Status: condition(metav1.ConditionTrue, "ClusterReady", "fine"),
	}
	tests := map[string]struct {
		change func(*clusterv1alpha1.Cluster)
		same   bool
	}{
		"a version":    {func(c *clusterv1alpha1.Cluster) { c.ResourceVersion, c.Generation = "2", 2 }, true},
		"nodes":        {func(c *clusterv1alpha1.Cluster) { c.Status.NodeSummary = &clusterv1alpha1.NodeSummary{TotalNum: 3} }, true},
		"a transition": {func(c *clusterv1alpha1.Cluster) { c.Status.Conditions[0].LastTransitionTime = metav1.Now() }, true},
		"a registration": {func(c *clusterv1alpha1.Cluster) {
			c.Annotations = map[string]string{kube.AnnotationFirstUse: time.Now().String()}
		}, true},
		"the hub's taint": {func(c *clusterv1alpha1.Cluster) {
			c.Spec.Taints = []corev1.Taint{{Key: clusterv1alpha1.TaintNotReady, Effect: corev1.TaintEffectNoSchedule}}
		}, true},
		"pods": {func(c *clusterv1alpha1.Cluster) {
			c.Status.ResourceSummary = &clusterv1alpha1.ResourceSummary{Allocated: corev1.ResourceList{"pods": resource.MustParse("1")}}
		}, true},
		"another taint": {func(c *clusterv1alpha1.Cluster) { c.Spec.Taints = []corev1.Taint{{Key: "mine"}} }, false},
		"a label":       {func(c *clusterv1alpha1.Cluster) { c.Labels["env"] = "test" }, false},
		"a finalizer":   {func(c *clusterv1alpha1.Cluster) { c.Finalizers = []string{"f"} }, false},
		"an order": {func(c *clusterv1alpha1.Cluster) {
			c.Annotations = map[string]string{kube.AnnotationDeregister: "force"}
		}, false},
		"a condition": {func(c *clusterv1alpha1.Cluster) { c.Status.Conditions[0].Status = metav1.ConditionFalse }, false},
		"a new API": {func(c *clusterv1alpha1.Cluster) {
			c.Status.APIEnablements = []clusterv1alpha1.APIEnablement{{GroupVersion: "v1"}}
		}, false},
		"another server": {func(c *clusterv1alpha1.Cluster) { c.Spec.APIEndpoint = "https://h" }, false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			changed := base.DeepCopy()
			tc.change(changed)
			whole := changed.DeepCopy()
			if got := cmp.Equal(strip(&base), strip(changed), cmp.Comparer(maps.Equal[map[string]string, map[string]string])); got != tc.same {
				t.Errorf("equal without volatile fields: got %t, want %t", got, tc.same)
			}
			if diff := cmp.Diff(whole, changed); diff != "" {
				t.Errorf("WithoutVolatileFields() changed its argument (-want +got):\n%s", diff)
			}
		})
	}
}

// strip removes the volatile fields, and replaces empty lists by nil.
func strip(c *clusterv1alpha1.Cluster) client.Object {
	s := fleet.WithoutVolatileFields(c).(*clusterv1alpha1.Cluster).DeepCopy()
	if len(s.Spec.Taints) == 0 {
		s.Spec.Taints = nil
	}
	return s
}
