package hub

import (
	"encoding/json"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// exampleSummary returns a summary as the hub writes it.
func exampleSummary(namespace, name string, shard fleet.Shard) *configv1beta1.ClusterSummary {
	now := metav1.NewTime(time.Unix(1_700_000_000, 0))
	summary := &configv1beta1.ClusterSummary{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "profile-sveltos-" + name,
			Labels: map[string]string{
				configv1beta1.ClusterProfileNameLabel: "profile", libv1beta1.ClusterNameLabel: name, libv1beta1.ClusterTypeLabel: "Sveltos",
			},
			Annotations: map[string]string{"towline.dev/pull-members": "1000"}, Finalizers: []string{configv1beta1.ClusterSummaryFinalizer},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: configv1beta1.GroupVersion.String(), Kind: configv1beta1.ClusterProfileKind, Name: "profile", UID: "profile-uid", Controller: ptr.To(true),
			}},
		},
		Spec: configv1beta1.ClusterSummarySpec{
			ClusterNamespace: namespace, ClusterName: name, ClusterType: "Sveltos",
			ClusterProfileSpec: configv1beta1.ProfileSpec{
				SyncMode: configv1beta1.SyncModeContinuous, ClusterSelector: metav1.LabelSelector{MatchLabels: map[string]string{"env": "prod"}},
				PolicyRefs: []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: "content", Name: "manifests"}},
			},
		},
		Status: configv1beta1.ClusterSummaryStatus{
			Dependencies: ptr.To("no dependencies"),
			FeatureSummaries: []configv1beta1.FeatureSummary{
				{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusProvisioned, Hash: []byte(name + "0123456789abcdef"), LastAppliedTime: &now},
				{FeatureID: libv1beta1.FeatureHelm, Status: libv1beta1.FeatureStatusProvisioned, Hash: []byte(name + "0123456789abcdef"), LastAppliedTime: &now},
			},
			DeployedGVKs: []libv1beta1.FeatureDeploymentInfo{{
				FeatureID: libv1beta1.FeatureResources, DeployedGroupVersionKind: []string{"Deployment.v1.apps", "Service.v1.", "ConfigMap.v1."},
			}},
			HelmReleaseSummaries: []configv1beta1.HelmChartSummary{{
				ReleaseName: "release", ReleaseNamespace: "namespace", Status: configv1beta1.HelmChartStatusManaging, ValuesHash: []byte(name + "0123456789abcdef"),
			}},
		},
	}
	shard.SetLabel(summary)
	return summary
}

// exampleGroup returns a group as the hub and an agent write it.
func exampleGroup(namespace, name string, shard fleet.Shard) *libv1beta1.ConfigurationGroup {
	group := &libv1beta1.ConfigurationGroup{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "group-" + name,
			Labels: map[string]string{
				libv1beta1.PullClusterNameLabel: name, libv1beta1.PullRequestorKindLabel: "ClusterSummary", libv1beta1.PullRequestorFeatureLabel: "Resources",
			},
			Annotations: map[string]string{
				libv1beta1.PullRequestorNameAnnotation: "profile-sveltos-" + name, "towline.dev/inputs": "0123456789012345678901234567890123456789",
				"towline.dev/bundle": `{"ID":{"RequestorKind":"ClusterSummary","RequestorName":"profile-sveltos-` + name + `","Feature":"Resources"}}`,
			},
		},
		Spec: libv1beta1.ConfigurationGroupSpec{
			Action: libv1beta1.ActionDeploy, SourceRef: &corev1.ObjectReference{Kind: "ClusterSummary", Namespace: namespace, Name: "profile-sveltos-" + name},
			RequestorHash: []byte(name + "0123456789abcdef"), Tier: 100,
			ConfigurationItems: []libv1beta1.ConfigurationItem{{
				ContentRef: &corev1.ObjectReference{Kind: "ConfigurationBundle", Namespace: namespace, Name: "config-" + name}, Hash: []byte(name + "0123456789abcdef"),
			}},
		},
		Status: libv1beta1.ConfigurationGroupStatus{
			DeploymentStatus: libv1beta1.FeatureStatusProvisioned, ObservedGeneration: 1, DeployedGroupVersionKind: []string{"Deployment.v1.apps", "ConfigMap.v1."},
		},
	}
	shard.SetLabel(group)
	return group
}

// exampleConfiguration returns the ClusterConfiguration of a cluster with ten objects.
func exampleConfiguration(namespace, name string, shard fleet.Shard) *configv1beta1.ClusterConfiguration {
	configuration := &configv1beta1.ClusterConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "sveltos--" + name}}
	now := metav1.NewTime(time.Unix(1_700_000_000, 0))
	feature := configv1beta1.DeployedFeature{FeatureID: libv1beta1.FeatureResources}
	for i := range 10 {
		feature.Resources = append(feature.Resources, configv1beta1.DeployedResource{Kind: "ConfigMap", Version: "v1", Namespace: "default", Name: fmt.Sprintf("object-%d", i), LastAppliedTime: &now})
	}
	configuration.Status.ClusterProfileResources = []configv1beta1.ClusterProfileResource{{ClusterProfileName: "profile", Features: []configv1beta1.DeployedFeature{feature}}}
	shard.SetLabel(configuration)
	return configuration
}

// examples returns the objects that the hub writes for one profile on a cluster.
func examples(namespace, name string, shard fleet.Shard) []client.Object {
	return []client.Object{exampleSummary(namespace, name, shard), exampleGroup(namespace, name, shard), exampleConfiguration(namespace, name, shard)}
}

// TestCacheOfAShard reads objects of three shards through the cache of a hub.
func TestCacheOfAShard(t *testing.T) {
	t.Parallel()
	plane := localkube.ForTest(t, localkube.Named("cache"))
	if err := InstallCRDs(t.Context(), plane.Config); err != nil {
		t.Fatal(err)
	}
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	namespace := plane.Namespace(t, "cache")
	for _, shard := range []fleet.Shard{"", "a", "b"} {
		for _, obj := range examples(namespace, "in-"+string(shard)+"x", shard) {
			obj.SetOwnerReferences(nil) // the garbage collector deletes objects of an owner that does not exist
			if err := hubClient.Create(t.Context(), obj.DeepCopyObject().(client.Object)); err != nil {
				t.Fatal(err)
			}
			withStatus := obj.DeepCopyObject().(client.Object)
			if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(obj), withStatus); err != nil {
				t.Fatal(err)
			}
			obj.SetResourceVersion(withStatus.GetResourceVersion())
			if err := hubClient.Status().Update(t.Context(), obj); err != nil {
				t.Fatal(err)
			}
		}
	}
	for shard, want := range map[fleet.Shard]map[string][]string{
		"":  {"summaries": {"", "a", "b"}, "groups": {""}, "configurations": {""}},
		"a": {"summaries": {"a"}, "groups": {"a"}, "configurations": {"a"}},
	} {
		options := cacheOptions(shard)
		options.Scheme = kube.Scheme()
		hubCache, err := cache.New(plane.Config, options)
		if err != nil {
			t.Fatal(err)
		}
		go func() { _ = hubCache.Start(t.Context()) }()
		if !hubCache.WaitForCacheSync(t.Context()) {
			t.Fatal("the cache does not start")
		}
		got := map[string][]string{}
		for kind, list := range map[string]client.ObjectList{
			"summaries": &configv1beta1.ClusterSummaryList{}, "groups": &libv1beta1.ConfigurationGroupList{}, "configurations": &configv1beta1.ClusterConfigurationList{},
		} {
			if err := hubCache.List(t.Context(), list); err != nil {
				t.Fatal(err)
			}
			_ = meta.EachListItem(list, func(item k8sruntime.Object) error {
				got[kind] = append(got[kind], item.(client.Object).GetLabels()[fleet.LabelShard])
				if summary, ok := item.(*configv1beta1.ClusterSummary); ok {
					wantReduced(t, shard, summary)
				}
				return nil
			})
			slices.Sort(got[kind])
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("shards of the objects in the cache of shard %q (-want +got):\n%s", shard, diff)
		}
	}
}

// wantReduced checks that a summary in the cache of a shard is complete, or has only the state of its features if it
// belongs to another shard.
func wantReduced(t *testing.T, shard fleet.Shard, summary *configv1beta1.ClusterSummary) {
	t.Helper()
	want := exampleSummary(summary.Namespace, summary.Spec.ClusterName, shard).Status
	if !shard.HasLabel(summary) {
		want = configv1beta1.ClusterSummaryStatus{FeatureSummaries: []configv1beta1.FeatureSummary{
			{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusProvisioned, Hash: want.FeatureSummaries[0].Hash},
			{FeatureID: libv1beta1.FeatureHelm, Status: libv1beta1.FeatureStatusProvisioned, Hash: want.FeatureSummaries[1].Hash},
		}}
	}
	if !equality.Semantic.DeepEqual(want, summary.Status) {
		t.Errorf("status of summary %s in the cache of shard %q: %s", summary.Name, shard, cmp.Diff(want, summary.Status))
	}
}

// BenchmarkCachedPair measures the heap of a hub per cluster and profile: for the objects of its own shard, of another
// shard in the default shard, and of another shard in a third one. Before there were labels, all objects were cached
// like those of the own shard.
func BenchmarkCachedPair(b *testing.B) {
	for name, shards := range map[string]struct{ hub, objects fleet.Shard }{
		"own": {"", ""}, "foreign/default": {"", "b"}, "foreign/shard": {"a", "b"},
	} {
		b.Run(name, func(b *testing.B) {
			options := cacheOptions(shards.hub)
			kept := make([]any, 0, 3*b.N)
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			for i := range b.N {
				for _, obj := range examples("fleet", fmt.Sprintf("cluster-%d", i), shards.objects) {
					if cached := throughCache(b, options, obj); cached != nil {
						kept = append(kept, cached)
					}
				}
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(b.N), "heap-B/pair")
			runtime.KeepAlive(kept)
		})
	}
}

// throughCache returns obj as a cache stores it, decoded from JSON, or nil if the cache does not select it.
func throughCache(b *testing.B, options cache.Options, obj client.Object) any {
	b.Helper()
	ofKind := cache.ByObject{}
	for kind, candidate := range options.ByObject {
		if reflect.TypeOf(kind) == reflect.TypeOf(obj) {
			ofKind = candidate
		}
	}
	if ofKind.Label != nil && !ofKind.Label.Matches(labels.Set(obj.GetLabels())) {
		return nil
	}
	raw, err := json.Marshal(obj)
	if err != nil {
		b.Fatal(err)
	}
	decoded := reflect.New(reflect.TypeOf(obj).Elem()).Interface()
	if err := json.Unmarshal(raw, decoded); err != nil {
		b.Fatal(err)
	}
	transform := options.DefaultTransform
	if ofKind.Transform != nil {
		transform = ofKind.Transform
	}
	cached, err := transform(decoded)
	if err != nil {
		b.Fatal(err)
	}
	return cached
}
