package fleet_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

func TestShardPredicate(t *testing.T) {
	t.Parallel()
	in := func(shard fleet.Shard) *libv1beta1.SveltosCluster {
		cluster := &libv1beta1.SveltosCluster{}
		if shard != "" {
			metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, libv1beta1.ShardAnnotation, string(shard))
		}
		return cluster
	}
	tests := map[string]struct {
		before, after fleet.Shard
		want          map[fleet.Shard]bool
	}{
		"one of nobody else": {"", "", map[fleet.Shard]bool{"": true, "k": false}},
		"one of k":           {"k", "k", map[fleet.Shard]bool{"": false, "k": true, "l": false}},
		"one that moves":     {"k", "l", map[fleet.Shard]bool{"": false, "k": true, "l": true}},
	}
	for name, tc := range tests {
		for shard, want := range tc.want {
			if got := shard.Predicate().Update(event.UpdateEvent{ObjectOld: in(tc.before), ObjectNew: in(tc.after)}); got != want {
				t.Errorf("%s: shard %q hears of it: %t, want %t", name, shard, got, want)
			}
			if got := shard.Serves(in(tc.after)); got != (shard == tc.after) {
				t.Errorf("%s: shard %q serves it: %t", name, shard, got)
			}
		}
	}
}
