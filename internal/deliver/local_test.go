package deliver_test

import (
	"testing"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
)

func TestLocalIDHasTheCluster(t *testing.T) {
	t.Parallel()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "web-sveltos-one", Feature: "Resources"}
	seen := map[bundle.ID]bool{id: true}
	for _, cluster := range []fleet.ID{
		{Type: fleet.TypeSveltos, Namespace: "eu", Name: "one"},
		{Type: fleet.TypeSveltos, Namespace: "us", Name: "one"},
		{Type: fleet.TypeKarmada, Namespace: "eu", Name: "one"},
	} {
		local := deliver.LocalID(cluster, id)
		if seen[local] {
			t.Errorf("LocalID() of %s is not unique: %s", cluster, local)
		}
		seen[local] = true
		if gotCluster, got, ok := deliver.ParseLocalID(local); !ok || gotCluster != cluster || got != id {
			t.Errorf("ParseLocalID(%s) = %s, %s, %v", local, gotCluster, got, ok)
		}
	}
	if _, _, ok := deliver.ParseLocalID(id); ok {
		t.Errorf("ParseLocalID(%s) is ok", id)
	}
}
