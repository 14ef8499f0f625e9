package engine_test

import (
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
)

// fastClock is one hour ahead.
type fastClock struct{ clock.RealClock }

func (fastClock) Now() time.Time { return time.Now().Add(time.Hour) }

// TestInputsAreRecorded checks that the record has the inputs of the last delivered bundle. Each engine is new, like
// after a restart.
func TestInputsAreRecorded(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	deliver := func(value, inputs string) {
		t.Helper()
		b := c.bundle("one", c.configMap("a", value))
		b.Inputs = inputs
		converge(t, c.engine(nil, func(o *engine.Options) { o.Clock = fastClock{} }), b)
	}
	id := c.bundle("one").ID
	recorded := func(what, want string) bundle.Deployed {
		t.Helper()
		found, ok, err := c.engine(nil).FindDeployed(t.Context(), id)
		if !ok || err != nil || found.Inputs != want {
			t.Errorf("%s: got inputs %q, %t, %v, want %q", what, found.Inputs, ok, err, want)
		}
		return found
	}
	b := c.bundle("one", c.configMap("a", "1"))
	b.Inputs = "first"
	converge(t, c.engine(nil), b)
	first := recorded("first delivery", "first")
	deliver("1", "second")
	if second := recorded("the same bundle of other inputs", "second"); !second.Report.LastApplied.Equal(first.Report.LastApplied) {
		t.Errorf("LastApplied of an unchanged bundle: got %s, want %s", second.Report.LastApplied, first.Report.LastApplied)
	}
	deliver("1", "")
	recorded("the same bundle of unknown inputs", "second")
	c.patch(configMaps, "a", `{"data":{"value":"drift"}}`)
	deliver("1", "")
	recorded("a correction", "second")
	if _, err := c.engine(nil).Suspend(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	recorded("suspended", "")
	deliver("2", "")
	recorded("another bundle of unknown inputs", "")
}
