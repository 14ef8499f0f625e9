package join_test

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// declared makes a pull-mode SveltosCluster as `kubectl apply` does, and no more.
func declared(t *testing.T, hubClient client.Client, namespace, name string) *libv1beta1.SveltosCluster {
	t.Helper()
	cluster := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	if err := hubClient.Create(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	return cluster
}

func established(t *testing.T, hubClient client.Client, cluster *libv1beta1.SveltosCluster) (delivery string) {
	t.Helper()
	delivery, err := join.Establish(t.Context(), hubClient, cluster)
	if err != nil {
		t.Fatal(err)
	}
	return delivery
}

// versions are the resource versions of everything in the namespaces that has to do with registrations, and of the
// namespaces.
func versions(t *testing.T, hubClient client.Client, namespaces ...string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, name := range namespaces {
		namespace := &corev1.Namespace{}
		if err := hubClient.Get(t.Context(), client.ObjectKey{Name: name}, namespace); err != nil {
			t.Fatal(err)
		}
		found["Namespace/"+name] = namespace.ResourceVersion
		for kind, list := range map[string]client.ObjectList{
			"ServiceAccount": &corev1.ServiceAccountList{}, "Secret": &corev1.SecretList{}, "Role": &rbacv1.RoleList{}, "RoleBinding": &rbacv1.RoleBindingList{},
			"Lease": &coordinationv1.LeaseList{}, "SveltosCluster": &libv1beta1.SveltosClusterList{},
		} {
			if err := hubClient.List(t.Context(), list, client.InNamespace(name)); err != nil {
				t.Fatal(err)
			}
			for _, obj := range items(t, list) {
				if obj.GetName() != "default" {
					found[kind+"/"+name+"/"+obj.GetName()] = obj.GetResourceVersion()
				}
			}
		}
	}
	return found
}

func TestEstablishMakesTheIdentityAndThenChangesNothing(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	namespace := newNamespace(t, hubClient, "establish")
	first, second := declared(t, hubClient, namespace, "one"), declared(t, hubClient, namespace, "two")
	if got := established(t, hubClient, first); got != namespace {
		t.Errorf("delivery namespace of the first: got %s, want %s", got, namespace)
	}
	if got, want := established(t, hubClient, second), namespace+"--two"; got != want {
		t.Errorf("delivery namespace of the second: got %s, want %s", got, want)
	}
	before := versions(t, hubClient, namespace, namespace+"--two")
	for kind, names := range map[string][]string{
		"ServiceAccount": {namespace + "/one", namespace + "/two"},
		"Secret":         {namespace + "/one-sveltos-agent", namespace + "/two-sveltos-agent"},
		"Role":           {namespace + "/one", namespace + "/two", namespace + "--two/two"},
		"RoleBinding":    {namespace + "/one", namespace + "/two", namespace + "--two/two"},
		"Lease":          {namespace + "/one", namespace + "--two/two"},
	} {
		for _, name := range names {
			if before[kind+"/"+name] == "" {
				t.Errorf("%s %s is missing", kind, name)
			}
		}
	}
	// The copies are from before the delivery namespace was written onto the second.
	established(t, hubClient, first)
	established(t, hubClient, second)
	if diff := cmp.Diff(before, versions(t, hubClient, namespace, namespace+"--two")); diff != "" {
		t.Errorf("a second time (-before +after):\n%s", diff)
	}
	live := &libv1beta1.SveltosCluster{}
	if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(second), live); err != nil {
		t.Fatal(err)
	}
	if got, want := live.Annotations[kube.AnnotationDeliveryNS], namespace+"--two"; got != want {
		t.Errorf("annotation of the second: got %q, want %s", got, want)
	}
}

func TestEstablishAfterARegistrationChangesNothing(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	namespace := plane.Namespace(t, "after")
	registered(t, plane, pullRequest(namespace, "c"))
	before := versions(t, hubClient, namespace)
	established(t, hubClient, clusterNamed(t, hubClient, namespace, "c"))
	if diff := cmp.Diff(before, versions(t, hubClient, namespace)); diff != "" {
		t.Errorf("objects (-before +after):\n%s", diff)
	}
}

func TestEstablishRepairs(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	namespace := newNamespace(t, hubClient, "repair")
	cluster := declared(t, hubClient, namespace, "c")
	established(t, hubClient, cluster)
	key := client.ObjectKeyFromObject(cluster)
	role := &rbacv1.Role{}
	if err := hubClient.Get(t.Context(), key, role); err != nil {
		t.Fatal(err)
	}
	want := role.DeepCopy().Rules
	for what, damage := range map[string]func() error{
		"a Role that says too little": func() error { role.Rules = role.Rules[:1]; return hubClient.Update(t.Context(), role) },
		"a Role that says too much": func() error {
			role.Rules = append(slices.Clone(want), rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}})
			return hubClient.Update(t.Context(), role)
		},
		"a missing Role":   func() error { return hubClient.Delete(t.Context(), role) },
		"a missing anchor": func() error { return hubClient.Delete(t.Context(), secretNamed(namespace, join.AnchorSecret("c"))) },
	} {
		t.Run(what, func(t *testing.T) {
			if err := damage(); err != nil {
				t.Fatal(err)
			}
			established(t, hubClient, cluster)
			role = &rbacv1.Role{}
			if err := hubClient.Get(t.Context(), key, role); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, role.Rules); diff != "" {
				t.Errorf("rules (-want +got):\n%s", diff)
			}
			if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: join.AnchorSecret("c")}, &corev1.Secret{}); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestEstablishRefuses(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	namespace := newNamespace(t, hubClient, "refuse")
	foreign := map[string]client.Object{
		"account": &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "account"}},
		"anchor":  secretNamed(namespace, join.AnchorSecret("anchor")),
		// It belongs to the registration of another cluster.
		"other": &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "other", Labels: map[string]string{"towline.dev/registration": "another"},
		}},
	}
	for name, obj := range foreign {
		if err := hubClient.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
		cluster := declared(t, hubClient, namespace, name)
		if _, err := join.Establish(t.Context(), hubClient, cluster); !errors.Is(err, join.ErrForeign) {
			t.Errorf("%s: got error %v, want ErrForeign", name, err)
		}
	}
	leaving := declared(t, hubClient, namespace, "leaving")
	leaving.Finalizers = []string{kube.FinalizerCluster}
	if err := errors.Join(hubClient.Update(t.Context(), leaving), hubClient.Delete(t.Context(), leaving)); err != nil {
		t.Fatal(err)
	}
	if _, err := join.Establish(t.Context(), hubClient, leaving); !errors.Is(err, join.ErrDeregistering) {
		t.Errorf("a cluster that is being deleted: got error %v, want ErrDeregistering", err)
	}
	leaving.Finalizers = nil
	if err := hubClient.Patch(t.Context(), leaving, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatal(err)
	}
	if _, err := join.Establish(t.Context(), hubClient, leaving); !errors.Is(err, join.ErrNotRegistered) {
		t.Errorf("a cluster that is gone: got error %v, want ErrNotRegistered", err)
	}
}

func newNamespace(t *testing.T, hubClient client.Client, prefix string) string {
	t.Helper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: prefix + "-"}}
	if err := hubClient.Create(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	return namespace.Name
}

func secretNamed(namespace, name string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
}

func clusterNamed(t *testing.T, hubClient client.Client, namespace, name string) *libv1beta1.SveltosCluster {
	t.Helper()
	cluster := &libv1beta1.SveltosCluster{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, cluster); err != nil {
		t.Fatal(err)
	}
	return cluster
}

// secretOf reads a Secret; nil if there is none.
func secretOf(t *testing.T, hubClient client.Client, namespace, name string) *corev1.Secret {
	t.Helper()
	secret := &corev1.Secret{}
	err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, secret)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return secret
}

func TestRegisterPullMergesOptionsAndKeepsTheShard(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	r := pullRequest(plane.Namespace(t, "options"), "c")
	r.Shard = "s1"
	r.Options = join.AgentOptions{Image: "registry.example.com/towline:v1", Limits: map[string]string{"memory": "1Gi"}, ImagePullSecrets: []string{"pull"}}
	registered(t, plane, r)
	again := pullRequest(r.Namespace, "c")
	again.Options = join.AgentOptions{ProxyURL: "http://proxy.example.com:3128", Limits: map[string]string{"cpu": "2"}}
	manifest := registered(t, plane, again)
	annotations := maps.Clone(clusterNamed(t, hubClient, r.Namespace, "c").Annotations)
	if got := annotations[libv1beta1.ShardAnnotation]; got != "s1" {
		t.Errorf("shard: got %q, want s1", got)
	}
	got, err := join.ParseAgentOptions(annotations[kube.AnnotationAgentOptions])
	if err != nil {
		t.Fatal(err)
	}
	want := r.Options
	want.ProxyURL, want.Limits = again.Options.ProxyURL, map[string]string{"cpu": "2", "memory": "1Gi"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("options (-want +got):\n%s", diff)
	}
	docs := documents(t, manifest)
	pod := docs[5]["spec"].(document)["template"].(document)["spec"].(document)
	container := pod["containers"].([]any)[0].(document)
	if diff := cmp.Diff(document{
		"limits": document{"cpu": "2", "memory": "1Gi"}, "requests": document{"cpu": "200m", "memory": "512Mi"},
	}, container["resources"].(document)); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
	if container["image"] != want.Image {
		t.Errorf("image: got %s, want %s", container["image"], want.Image)
	}
	if diff := cmp.Diff([]any{document{"name": "pull"}}, pod["imagePullSecrets"]); diff != "" {
		t.Errorf("pull secrets (-want +got):\n%s", diff)
	}
	config, _ := agentConfig(t, manifest)
	if proxy, err := config.Proxy(nil); err != nil || proxy.String() != again.Options.ProxyURL {
		t.Errorf("proxy: got %v and %v, want %s", proxy, err, again.Options.ProxyURL)
	}
}

// annotateDelivery writes the annotation that names a cluster's delivery namespace; "" takes it off.
func annotateDelivery(t *testing.T, hubClient client.Client, cluster *libv1beta1.SveltosCluster, namespace string) {
	t.Helper()
	value := any(namespace)
	if namespace == "" {
		value = nil
	}
	annotate(t, hubClient, cluster, kube.AnnotationDeliveryNS, value)
}

// annotate writes one annotation of obj; nil takes it off.
func annotate(t *testing.T, hubClient client.Client, obj client.Object, name string, value any) {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{name: value}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := hubClient.Patch(t.Context(), obj, client.RawPatch(types.MergePatchType, patch)); err != nil {
		t.Fatal(err)
	}
}

func TestDeliveryNamespaceIsFoundByItsClaim(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	for name, test := range map[string]struct {
		second bool   // of the second cluster, which has a derived namespace
		value  string // the changed value of the annotation
	}{
		"lost":                      {second: true},
		"changed to the own one":    {second: true, value: "own"},
		"nonsense":                  {second: true, value: "kube-system"},
		"own: changed to a derived": {value: "derived"},
		"own: nonsense":             {value: "kube-system"},
	} {
		for name, restore := range map[string]func(*libv1beta1.SveltosCluster) error{
			name + ", established again": func(c *libv1beta1.SveltosCluster) error {
				_, err := join.Establish(t.Context(), hubClient, c)
				return err
			},
			name + ", restored": func(c *libv1beta1.SveltosCluster) error {
				return join.RestoreDeliveryAnnotation(t.Context(), hubClient, c)
			},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				namespace := newNamespace(t, hubClient, "claimed")
				first, second := declared(t, hubClient, namespace, "one"), declared(t, hubClient, namespace, "two")
				want := established(t, hubClient, first)
				cluster := first
				if test.second {
					want, cluster = established(t, hubClient, second), second
					// Now its own namespace is free.
					if _, err := join.DeleteHubObjects(t.Context(), hubClient, nil, first); err != nil {
						t.Fatal(err)
					}
				}
				names := strings.NewReplacer("own", namespace, "derived", fleet.DerivedNamespace(namespace, cluster.Name))
				annotateDelivery(t, hubClient, cluster, names.Replace(test.value))
				if err := restore(cluster); err != nil {
					t.Fatal(err)
				}
				live := clusterNamed(t, hubClient, namespace, cluster.Name)
				if got, foreign := fleet.DeliveryNamespace(live); got != want || foreign {
					t.Errorf("delivery namespace: got %s, foreign %t; want %s", got, foreign, want)
				}
			})
		}
	}
}

func TestNamespaceThatLostItsClaimStaysItsClusters(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	namespace := newNamespace(t, hubClient, "unclaimed")
	first, second := declared(t, hubClient, namespace, "one"), declared(t, hubClient, namespace, "two")
	established(t, hubClient, first)
	annotate(t, hubClient, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, kube.AnnotationDeliveryHolder, nil)
	if got, want := established(t, hubClient, second), namespace+"--two"; got != want {
		t.Errorf("delivery namespace of the second: got %s, want %s", got, want)
	}
	if got := established(t, hubClient, first); got != namespace {
		t.Errorf("delivery namespace of the first: got %s, want %s", got, namespace)
	}
}
