package works_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	hubworks "github.com/towline/towline/internal/hub/works"
	"github.com/towline/towline/internal/works"
	"github.com/towline/towline/test/controllers"
)

// silentEngine is an engine of a cluster that accepts requests and does not answer.
type silentEngine struct {
	works.Engine
	waiting *controllers.Concurrency
}

func (s silentEngine) Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	defer s.waiting.Begin()()
	<-ctx.Done()
	return bundle.Report{ID: b.ID}, context.Cause(ctx)
}

func TestSilentClusterBlocksNoOther(t *testing.T) {
	t.Parallel()
	var waiting controllers.Concurrency
	// Controllers of other tests ignore this shard.
	const shard = "with-a-silent-cluster"
	w := newTestEnv(t, clusterv1alpha1.Push, func(c *hubworks.Controller) {
		c.Shard, c.Limit = shard, time.Hour
		engines := c.Engines
		c.Engines = func(ctx context.Context, m fleet.Member) (works.Engine, error) {
			e, err := engines(ctx, m)
			if strings.HasPrefix(m.Name, "silent") {
				e = silentEngine{e, &waiting}
			}
			return e, err
		}
	})
	for n, all := range []int{20, 30, 31, 32} {
		silentCluster := w.withCluster(t, fmt.Sprintf("silent-%d", n), shard)
		silentCluster.setReady(metav1.ConditionTrue)
		for i := range 22 {
			silentCluster.createWork(fmt.Sprintf("one-%d", i), configMapManifest)
		}
		silentCluster.eventually("the cluster gets requests", func() bool { return waiting.Running() == all })
	}
	other := w.withCluster(t, "answers", shard)
	other.setReady(metav1.ConditionTrue)
	other.createWork("one", configMapManifest)
	other.eventually("applied at the same time", func() bool { return other.isApplied("one") })
	if waiting.Running() == 0 || waiting.Most() > 32 {
		t.Errorf("waiting for the silent clusters: %d, at most %d", waiting.Running(), waiting.Most())
	}
}

func TestAllWorksOfAClusterAreExecuted(t *testing.T) {
	t.Parallel()
	const shard = "with-many-works"
	w := newTestEnv(t, clusterv1alpha1.Push, func(c *hubworks.Controller) { c.Shard = shard })
	many := w.withCluster(t, "many", shard)
	for i := range 40 {
		many.createWork(fmt.Sprintf("one-%d", i), fmt.Sprintf(
			"{apiVersion: v1, kind: ConfigMap, metadata: {name: many-%d, namespace: OBJECTS}, data: {key: one}}", i))
	}
	many.setReady(metav1.ConditionTrue)
	for i := range 40 {
		many.eventually("applied", func() bool { return many.isApplied(fmt.Sprintf("one-%d", i)) })
	}
}

func TestWorkOfUnreachablePushCluster(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t, clusterv1alpha1.Push)
	w.setReady(metav1.ConditionTrue)
	w.createWork("old", "{apiVersion: v1, kind: Service, metadata: {name: a, namespace: OBJECTS}, spec: {ports: [{port: 80}]}}")
	w.eventually("applied", func() bool { return w.isApplied("old") && w.get("old").Status.ManifestStatuses[0].Status != nil })
	w.setReady(metav1.ConditionFalse)
	w.waitCached()
	w.createWork("new", "{apiVersion: v1, kind: ConfigMap, metadata: {name: b, namespace: OBJECTS}}")
	w.eventually("reported", func() bool {
		fresh, old := w.get("new").Status, w.get("old").Status
		applied := meta.FindStatusCondition(fresh.Conditions, workv1alpha1.WorkApplied)
		return meta.IsStatusConditionTrue(fresh.Conditions, workv1alpha1.WorkDispatching) &&
			applied != nil && applied.Status == metav1.ConditionFalse && applied.Message == "Failed to apply all manifests (0/1): the cluster does not answer" &&
			w.isApplied("old") && old.ManifestStatuses[0].Health == workv1alpha1.ResourceUnknown && old.ManifestStatuses[0].Status != nil
	})
	w.setReady(metav1.ConditionTrue)
	w.eventually("applied again", func() bool {
		return w.isApplied("new") && w.get("old").Status.ManifestStatuses[0].Health == workv1alpha1.ResourceHealthy
	})
}
