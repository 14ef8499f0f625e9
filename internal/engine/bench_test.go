package engine_test

import (
	"fmt"
	"testing"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
)

// benchObjects is the number of ConfigMaps that one round applies.
const benchObjects = 200

// BenchmarkEngineApply measures the objects per second of the engine, with all its reads and records, and of loops of
// server-side apply requests for the same objects: one request at a time, and eight in parallel like the engine.
func BenchmarkEngineApply(b *testing.B) {
	c := newCluster(b)
	round := func(i int) []*unstructured.Unstructured {
		objects := make([]*unstructured.Unstructured, benchObjects)
		for k := range objects {
			objects[k] = c.configMap(fmt.Sprintf("cm-%d", k), fmt.Sprintf("round-%d", i))
		}
		return objects
	}
	bare := func(b *testing.B, parallel int) {
		api := c.objects.Resource(configMaps).Namespace(c.ns)
		for i := 0; b.Loop(); i++ {
			var work errgroup.Group
			work.SetLimit(parallel)
			for _, obj := range round(i) {
				work.Go(func() error {
					_, err := api.Apply(b.Context(), obj.GetName(), obj, metav1.ApplyOptions{FieldManager: "bare", Force: true})
					return err
				})
			}
			if err := work.Wait(); err != nil {
				b.Fatal(err)
			}
		}
		perSecond(b)
	}
	b.Run("bare loop", func(b *testing.B) { bare(b, 1) })
	b.Run("bare loop, 8 at once", func(b *testing.B) { bare(b, 8) })
	// The engine uses other names, because it would adopt the objects of the loops.
	if err := c.objects.Resource(configMaps).Namespace(c.ns).DeleteCollection(b.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		b.Fatal(err)
	}
	e := c.engine(nil)
	b.Run("engine, changed", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			converge(b, e, c.bundle("bench", round(i)...))
		}
		perSecond(b)
	})
	b.Run("engine, unchanged", func(b *testing.B) {
		want := c.bundle("bench", round(-1)...)
		converge(b, e, want)
		for b.Loop() {
			converge(b, e, want)
		}
		perSecond(b)
	})
	withdraw(b, e, bundle.Withdrawal{ID: c.bundle("bench").ID})
}

func perSecond(b *testing.B) {
	b.ReportMetric(float64(benchObjects*b.N)/b.Elapsed().Seconds(), "objects/s")
}
