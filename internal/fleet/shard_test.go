package fleet_test

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/event"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
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
		"of the default shard": {"", "", map[fleet.Shard]bool{"": true, "k": false}},
		"of shard k":           {"k", "k", map[fleet.Shard]bool{"": false, "k": true, "l": false}},
		"between shards":       {"k", "l", map[fleet.Shard]bool{"": false, "k": true, "l": true}},
	}
	for name, tc := range tests {
		for shard, want := range tc.want {
			if got := shard.Predicate().Update(event.UpdateEvent{ObjectOld: in(tc.before), ObjectNew: in(tc.after)}); got != want {
				t.Errorf("%s: predicate of shard %q: got %t, want %t", name, shard, got, want)
			}
			if got := shard.Serves(in(tc.after)); got != (shard == tc.after) {
				t.Errorf("%s: shard %q serves the object: %t", name, shard, got)
			}
		}
	}
}

func TestShardSeesAll(t *testing.T) {
	t.Parallel()
	none := "none"
	for name, test := range map[string]struct {
		shard, labelled string
		want            map[fleet.Shard]bool
	}{
		"never in a shard":                 {"", none, map[fleet.Shard]bool{"": true, "k": false}},
		"new in k, or before an upgrade":   {"k", none, map[fleet.Shard]bool{"": false, "k": false}},
		"while k labels":                   {"k", fleet.BeingLabelled, map[fleet.Shard]bool{"": false, "k": false}},
		"in k":                             {"k", "k", map[fleet.Shard]bool{"": false, "k": true, "l": false}},
		"moved from k to l":                {"l", "k", map[fleet.Shard]bool{"": false, "k": false, "l": false}},
		"moved from k to the default":      {"", "k", map[fleet.Shard]bool{"": false, "k": false}},
		"moved back":                       {"", "", map[fleet.Shard]bool{"": true, "k": false}},
		"moved while the default labels":   {"k", "", map[fleet.Shard]bool{"": false, "k": false}},
		"while the default shard's labels": {"", fleet.BeingLabelled, map[fleet.Shard]bool{"": false, "k": false}},
	} {
		cluster := &libv1beta1.SveltosCluster{}
		if test.shard != "" {
			metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, libv1beta1.ShardAnnotation, test.shard)
		}
		if test.labelled != none {
			metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationLabelledShard, test.labelled)
		}
		for shard, want := range test.want {
			if got := shard.SeesAll(cluster); got != want {
				t.Errorf("%s: shard %q sees all objects: %t, want %t", name, shard, got, want)
			}
		}
		wantSharded := test.shard != "" || test.labelled != none
		if got := fleet.FromSveltosCluster(cluster).CacheMayLackObjects; got != wantSharded {
			t.Errorf("%s: CacheMayLackObjects is %t, want %t", name, got, wantSharded)
		}
	}
}

func TestShardLabels(t *testing.T) {
	t.Parallel()
	shards := []fleet.Shard{"", "k", "l", "not a label", fleet.Shard(strings.Repeat("x", 64))}
	for _, shard := range shards {
		obj := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b", fleet.LabelShard: "former"}}}
		shard.SetLabel(obj)
		if problems := validation.IsValidLabelValue(obj.Labels[fleet.LabelShard]); len(problems) > 0 {
			t.Errorf("label of shard %q: %v", shard, problems)
		}
		if obj.Labels["a"] != "b" {
			t.Errorf("shard %q changes other labels", shard)
		}
		for _, other := range shards {
			want := other == shard
			if got := other.HasLabel(obj); got != want {
				t.Errorf("an object of shard %q has the label of %q: %t", shard, other, got)
			}
			if got := other.Selector().Matches(labels.Set(obj.Labels)); got != want {
				t.Errorf("the selector of shard %q matches an object of %q: %t", other, shard, got)
			}
		}
	}
}
