package engine

import (
	"context"
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
)

// BenchmarkListPartition measures the time to list the 10 bundles of one partition, with the given number of
// partitions. The time must not depend on the number of partitions.
func BenchmarkListPartition(b *testing.B) {
	const bundles = 10
	for _, partitions := range []int{10, 1_000} {
		b.Run(fmt.Sprintf("%d partitions", partitions), func(b *testing.B) {
			store := inventory.NewPartitionedStore(fake.NewClientset().CoreV1(), metadatafake.NewSimpleMetadataClient(runtime.NewScheme()), "records", inventory.LocalScope(), &inventory.Partitions{
				Of:           func(id bundle.ID) string { return id.RequestorName },
				ListAssigned: func(context.Context) ([]string, error) { return nil, nil },
				IsAssigned:   func(context.Context, string) (bool, error) { return true, nil },
			})
			e := &Engine{store: store}
			var partition string
			for i := range partitions {
				partition = fmt.Sprintf("cluster-%d", i)
				if _, err := e.Serve(b.Context(), partition); err != nil {
					b.Fatal(err)
				}
				for k := range bundles {
					none := &inventory.Record{Head: inventory.Head{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: partition, Feature: fmt.Sprint(k)}}}
					if _, err := store.Save(b.Context(), none, none.Edit(), &bundle.Bundle{ID: none.ID}); err != nil {
						b.Fatal(err)
					}
				}
			}
			if err := store.List(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.ResetTimer()
			for b.Loop() {
				if all, err := e.ListPartition(b.Context(), partition); err != nil || len(all) != bundles {
					b.Fatalf("got %d, %v", len(all), err)
				}
			}
		})
	}
}
