package engine_test

import (
	"testing"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// TestClusterRegisteredAgainTakesOverItsObjects deploys one profile with two records on a member, as after a
// registration with another name.
func TestClusterRegisteredAgainTakesOverItsObjects(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	before := c.bundle("before", c.configMap("a", "1"), c.configMap("b", "1"), c.configMap("left", "1"))
	before.Owner.Name = "profile"
	converge(t, h.Engine, before)
	after := c.bundle("after", c.configMap("a", "1"), c.configMap("b", "1"))
	after.Owner.Name = "profile"
	wantChanges(t, converge(t, h.Engine, after).Changes, counts{bundle.Configured: 2})
	eventually(t, "the first one knows that it lost", func() bool {
		_, state, _, err := h.RecordedDigest(t.Context(), before.ID)
		return err == nil && state == bundle.StateFailed
	})

	// The engine corrects the objects of the first bundle that the second bundle has not taken over. It does not create
	// objects again that the second bundle drops, and takes no objects back.
	after.Items[0].Objects = after.Items[0].Objects[:1]
	wantChanges(t, converge(t, h.Engine, after).Changes, counts{bundle.Unchanged: 1, bundle.Deleted: 1})
	c.delete(configMaps, "left")
	c.delete(configMaps, "a")
	eventually(t, "corrected", func() bool { return c.value("left") == "1" && c.value("a") == "1" })
	if got := c.get(configMaps, c.ns, "a").GetAnnotations()[kube.AnnotationRequestor]; got != after.ID.String() {
		t.Errorf("requestor: got %s, want %s", got, after.ID)
	}
	c.wantNames(configMaps, "a", "left")
	withdraw(t, h.Engine, bundle.Withdrawal{ID: before.ID})
	c.wantNames(configMaps, "a")

	// A new delivery of the first bundle takes its objects over again.
	again := c.bundle("before", c.configMap("a", "2"))
	again.Owner.Name = "profile"
	converge(t, h.Engine, again)
	wantConvergeError(t, h.Engine, after)
	withdraw(t, h.Engine, bundle.Withdrawal{ID: again.ID})
	eventually(t, "the other one applies it again", func() bool { return c.value("a") == "1" })
}

func TestInterruptedTakeoverIsContinued(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	before := c.bundle("before", c.configMap("a", "1"), c.configMap("b", "1"))
	before.Owner.Name = "profile"
	for n := 1; ; n++ {
		// Each iteration is a new registration with its first delivery.
		converge(t, c.engine(nil), before)
		after := c.bundle("after", c.configMap("a", "1"), c.configMap("b", "1"))
		after.Owner.Name = "profile"
		line := &meter{}
		line.cutAfter(n)
		_, err := c.engine(line).Converge(t.Context(), after)
		converge(t, c.engine(nil), after)
		withdraw(t, c.engine(nil), bundle.Withdrawal{ID: before.ID})
		c.wantNames(configMaps, "a", "b")
		withdraw(t, c.engine(nil), bundle.Withdrawal{ID: after.ID})
		c.wantNames(configMaps)
		c.wantRecords(0)
		if err == nil || t.Failed() {
			return
		}
	}
}
