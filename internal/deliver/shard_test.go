package deliver

import (
	"context"
	"net/http"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// cacheOfShard is a reader like the cache of a hub: it has only the groups with the label of the shard.
type cacheOfShard struct {
	client.Client
	shard fleet.Shard
}

func (c cacheOfShard) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	if err := c.Client.Get(ctx, key, obj, opts...); err != nil {
		return err
	}
	if group, ok := obj.(*libv1beta1.ConfigurationGroup); ok && !c.shard.HasLabel(group) {
		*group = libv1beta1.ConfigurationGroup{}
		return apierrors.NewNotFound(schema.GroupResource{Resource: "configurationgroups"}, key.Name)
	}
	return nil
}

func (c cacheOfShard) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	if _, ok := list.(*libv1beta1.ConfigurationGroupList); ok {
		opts = append(opts, client.MatchingLabelsSelector{Selector: c.shard.Selector()})
	}
	return c.Client.List(ctx, list, opts...)
}

// newCachedTransport returns the transport of a shard that reads through the cache of this shard.
func (h *hub) newCachedTransport(shard fleet.Shard) *PullTransport {
	h.t.Helper()
	hubClient := clientFor(h.t, h.requests.wrap(h.plane.Config))
	pull, err := NewShardPullTransport(cacheOfShard{hubClient, shard}, hubClient, testKey, shard)
	if err != nil {
		h.t.Fatal(err)
	}
	return pull
}

// TestGroupsMoveToAnotherShard moves an applied bundle of shard k to shard l, whose cache does not have it. Shard l
// finds the bundle, and neither delivers it nor creates the group again.
func TestGroupsMoveToAnotherShard(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("moves")
	m.CacheMayLackObjects = true
	k, l, unsharded := h.newCachedTransport("k"), h.newCachedTransport("l"), h.newCachedTransport("")
	b := testBundle(objects("a", "1"))
	mustDeliver(t, k, m, b)
	_, stop := h.startAgent(m, newMemberEngine())
	deliverUntil(t, k, m, b, bundle.StateApplied)
	stop()
	before := h.getGroup(m, b.ID)
	if !k.shard.HasLabel(before) {
		t.Fatalf("the labels are %v", before.Labels)
	}
	wantKept := func(shard fleet.Shard) {
		t.Helper()
		after := h.getGroup(m, b.ID)
		if after.UID != before.UID || after.Generation != before.Generation || !shard.HasLabel(after) {
			t.Errorf("after shard %q: uid %s, generation %d, labels %v; before: %s, %d", shard, after.UID, after.Generation, after.Labels, before.UID, before.Generation)
		}
	}
	for _, next := range []*PullTransport{l, unsharded} {
		if _, ok, err := next.FindDeployed(t.Context(), m, b.ID); !ok || err != nil {
			t.Errorf("shard %q does not find the bundle: %v", next.shard, err)
		}
		if report, err := next.Deliver(t.Context(), m, b); err != nil || report.State != bundle.StateApplied {
			t.Errorf("Deliver() = %+v, %v", report, err)
		}
		wantKept(next.shard)
	}
	// The controller labels groups without a delivery.
	for _, next := range []*PullTransport{k, unsharded} {
		if done, err := next.LabelGroups(t.Context(), m); !done || err != nil {
			t.Errorf("LabelGroups() = %t, %v", done, err)
		}
		wantKept(next.shard)
	}
	// A cluster without a shard causes no further requests.
	m.CacheMayLackObjects = false
	h.requests.take()
	if _, ok, err := k.FindDeployed(t.Context(), m, b.ID); ok || err != nil {
		t.Errorf("FindDeployed() = %t, %v", ok, err)
	}
	if log := h.requests.take(http.MethodGet, "configurationgroups"); len(log) != 1 {
		t.Errorf("requests for groups: %v, want only the request of the cache", log)
	}
}

// TestContentOfTheFormerShard moves a cluster before its agent has fetched a bundle. The new shard does not use the
// content that the collector of the former shard may delete.
func TestContentOfTheFormerShard(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("pending")
	m.CacheMayLackObjects = true
	b := testBundle(objects("a", "1"))
	mustDeliver(t, h.newCachedTransport("former"), m, b)
	next := h.newCachedTransport("next")
	mustDeliver(t, next, m, b)
	for _, item := range h.getGroup(m, b.ID).Spec.ConfigurationItems {
		content := &libv1beta1.ConfigurationBundle{}
		if err := h.admin.Get(t.Context(), client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name}, content); err != nil {
			t.Fatal(err)
		}
		if !next.shard.HasLabel(content) {
			t.Errorf("the group refers to content with the labels %v", content.Labels)
		}
	}
}
