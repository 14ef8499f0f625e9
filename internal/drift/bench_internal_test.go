package drift

import (
	"context"
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// BenchmarkEvent shows the time of one event of an object, with the given number of records of 5 objects. It must not
// grow with their number.
func BenchmarkEvent(b *testing.B) {
	for _, records := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("%d records", records), func(b *testing.B) {
			store := newFakeStore()
			var key kube.Ref
			for i := range records {
				key = saveRecord(b, store, i)
			}
			c := New(Options{Store: store, Clock: clock.RealClock{}})
			defer c.queue.ShutDown()
			b.ResetTimer()
			for b.Loop() {
				c.onEvent(key, observation{uid: "uid", fingerprint: "same"})
			}
		})
	}
}

// newFakeStore returns a Store on a member that has nothing but records.
func newFakeStore() *inventory.Store {
	return inventory.NewStore(fake.NewClientset().CoreV1(), metadatafake.NewSimpleMetadataClient(runtime.NewScheme()), "records", inventory.OwnerScope{})
}

// saveRecord saves a record with 5 objects, and returns the key of one of them.
func saveRecord(tb testing.TB, store *inventory.Store, i int) (key kube.Ref) {
	tb.Helper()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: fmt.Sprintf("Sveltos/default/cluster-%d/web", i), Feature: "Resources"}
	none := &inventory.Record{Head: inventory.Head{ID: id}}
	next := none.Edit()
	next.State, next.Options.CorrectDrift = bundle.StateApplied, true
	for k := range 5 {
		ref := kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "default", Name: fmt.Sprintf("object-%d-%d", i, k)}
		key = ref.Key()
		next.Entries[key] = inventory.Entry{Ref: ref, UID: types.UID("uid"), Fingerprint: "same"}
	}
	if _, err := store.Save(context.Background(), none, next, &bundle.Bundle{ID: id}); err != nil {
		tb.Fatal(err)
	}
	return key
}
