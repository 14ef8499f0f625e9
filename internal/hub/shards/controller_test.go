package shards

import (
	"context"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
)

const clusterIndex = "cluster"

// newCluster returns a cluster of shard whose annotation names the shard labelled, "none": it has no annotation.
func newCluster(shard, labelled string) *libv1beta1.SveltosCluster {
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "eu", Name: "one", Annotations: map[string]string{}}}
	if shard != "" {
		cluster.Annotations[libv1beta1.ShardAnnotation] = shard
	}
	if labelled != "none" {
		cluster.Annotations[kube.AnnotationLabelledShard] = labelled
	}
	return cluster
}

// newSummary returns a summary of the cluster with the label of a shard.
func newSummary(name string, shard fleet.Shard) *configv1beta1.ClusterSummary {
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{
		Namespace: "eu", Name: name, Labels: map[string]string{libv1beta1.ClusterNameLabel: "one", libv1beta1.ClusterTypeLabel: string(fleet.TypeSveltos)},
	}}
	summary.Spec.ClusterNamespace, summary.Spec.ClusterName, summary.Spec.ClusterType = "eu", "one", libv1beta1.ClusterType(fleet.TypeSveltos)
	shard.SetLabel(summary)
	return summary
}

// newForeignSummary returns a summary that no hub created: it has the label of a shard only.
func newForeignSummary(name string, shard fleet.Shard) *configv1beta1.ClusterSummary {
	summary := newSummary(name, "")
	summary.Labels = nil
	shard.SetLabel(summary)
	return summary
}

// hubOf returns a client of the hub with objects, and the names of the objects that were patched through it.
func hubOf(objects ...client.Object) (hubClient client.Client, patched *[]string) {
	patched = &[]string{}
	hubClient = fake.NewClientBuilder().WithScheme(kube.Scheme()).WithObjects(objects...).
		WithIndex(&configv1beta1.ClusterSummary{}, clusterIndex, func(obj client.Object) []string {
			return []string{match.MemberID(obj.(*configv1beta1.ClusterSummary)).String()}
		}).
		WithInterceptorFuncs(interceptor.Funcs{
			Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
				*patched = append(*patched, obj.GetName())
				return c.Patch(ctx, obj, patch, opts...)
			},
		}).Build()
	return hubClient, patched
}

func TestReconcile(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		hub     fleet.Shard
		cluster *libv1beta1.SveltosCluster
		summary *configv1beta1.ClusterSummary
		// isCacheBehind is true if the groups are not in the cache yet.
		isCacheBehind bool
		wantPatched   []string
		wantLabelled  string
	}{
		"a cluster that never had a shard":   {hub: "", cluster: newCluster("", "none"), summary: newSummary("s", ""), wantLabelled: "none"},
		"a complete cluster":                 {hub: "a", cluster: newCluster("a", "a"), summary: newSummary("s", "a"), wantLabelled: "a"},
		"another shard":                      {hub: "a", cluster: newCluster("b", "a"), summary: newSummary("s", "a"), wantLabelled: "a"},
		"first, no hub serves the summaries": {hub: "a", cluster: newCluster("a", "b"), summary: newSummary("s", "b"), wantPatched: []string{"one"}, wantLabelled: fleet.BeingLabelled},
		"then, all have the label": {
			hub: "a", cluster: newCluster("a", fleet.BeingLabelled), summary: newSummary("s", "b"), wantPatched: []string{"s", "one"}, wantLabelled: "a",
		},
		"an incomplete cache": {
			hub: "a", cluster: newCluster("a", fleet.BeingLabelled), summary: newSummary("s", "b"), isCacheBehind: true,
			wantPatched: []string{"s"}, wantLabelled: fleet.BeingLabelled,
		},
		"back in the default shard": {
			hub: "", cluster: newCluster("", fleet.BeingLabelled), summary: newSummary("s", "b"), wantPatched: []string{"s", "one"}, wantLabelled: "",
		},
		"a wrong label in the default shard": {
			hub: "", cluster: newCluster("", "none"), summary: newSummary("s", "b"), wantPatched: []string{"one"}, wantLabelled: fleet.BeingLabelled,
		},
		"a wrong label in another shard": {
			hub: "", cluster: newCluster("a", "a"), summary: newSummary("s", "b"), wantPatched: []string{"one"}, wantLabelled: fleet.BeingLabelled,
		},
		"a wrong label on a summary of a user": {
			hub: "", cluster: newCluster("", "none"), summary: newForeignSummary("s", "b"), wantLabelled: "none",
		},
		"a wrong label that another hub changes": {
			hub: "", cluster: newCluster("a", fleet.BeingLabelled), summary: newSummary("s", "b"), wantLabelled: fleet.BeingLabelled,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hubClient, patched := hubOf(test.cluster, test.summary)
			c := &Controller{
				Hub: hubClient, Live: hubClient, Shard: test.hub, SummaryIndex: clusterIndex,
				LabelGroups: func(context.Context, fleet.Member) (bool, error) { return !test.isCacheBehind, nil },
			}
			result, err := c.Reconcile(t.Context(), fleet.FromObject(test.cluster).ID())
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(*patched, test.wantPatched) {
				t.Errorf("patched %v, want %v", *patched, test.wantPatched)
			}
			if waits := result.RequeueAfter > 0; waits != test.isCacheBehind {
				t.Errorf("it waits for the cache: %t", waits)
			}
			stored := &libv1beta1.SveltosCluster{}
			if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(test.cluster), stored); err != nil {
				t.Fatal(err)
			}
			labelled, ok := stored.Annotations[kube.AnnotationLabelledShard]
			if !ok {
				labelled = "none"
			}
			if labelled != test.wantLabelled {
				t.Errorf("the annotation is %q, want %q", labelled, test.wantLabelled)
			}
		})
	}
}

// TestMoveDuringReconcile has a cache with the cluster in shard a, although it was moved back to b: the annotation must
// not claim that the objects have the labels of a or b.
func TestMoveDuringReconcile(t *testing.T) {
	t.Parallel()
	for _, labelled := range []string{"b", fleet.BeingLabelled} {
		stale := newCluster("a", labelled)
		cached, _ := hubOf(stale)
		live, patched := hubOf(stale.DeepCopy())
		moved := &libv1beta1.SveltosCluster{}
		if err := live.Get(t.Context(), client.ObjectKeyFromObject(stale), moved); err != nil {
			t.Fatal(err)
		}
		moved.Annotations[libv1beta1.ShardAnnotation] = "b"
		if err := live.Update(t.Context(), moved); err != nil {
			t.Fatal(err)
		}
		c := &Controller{Hub: cachedClient{live, cached}, Live: live, Shard: "a", SummaryIndex: clusterIndex}
		result, err := c.Reconcile(t.Context(), fleet.FromObject(stale).ID())
		if err != nil || result.RequeueAfter == 0 {
			t.Errorf("Reconcile() = %v, %v, want a delay", result, err)
		}
		if err := live.Get(t.Context(), client.ObjectKeyFromObject(stale), moved); err != nil {
			t.Fatal(err)
		}
		if got := moved.Annotations[kube.AnnotationLabelledShard]; got != labelled {
			t.Errorf("the annotation is %q, want %q; patched %v", got, labelled, *patched)
		}
	}
}

// cachedClient writes to Client and reads from cache.
type cachedClient struct {
	client.Client
	cache client.Reader
}

func (c cachedClient) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	return c.cache.Get(ctx, key, obj, opts...)
}
