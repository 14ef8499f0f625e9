package engine

import (
	"testing"
	"time"

	"github.com/towline/towline/internal/bundle"
)

func TestNewsIsPaced(t *testing.T) {
	t.Parallel()
	n := newNews()
	busy, quiet := bundle.ID{RequestorName: "busy"}, bundle.ID{RequestorName: "quiet"}
	told := map[bundle.ID]int{}
	start := time.Now()
	take := func(after time.Duration) time.Duration {
		ids, pause := n.take(start.Add(after))
		for _, id := range ids {
			told[id]++
		}
		return pause
	}
	// A status that changes each second, for half a minute.
	for second := range 30 {
		n.add(busy, sighting{})
		if second == 7 {
			n.add(quiet, sighting{})
		}
		pause := take(time.Duration(second) * time.Second)
		if second == 0 && told[busy] != 1 {
			t.Error("the first news waits")
		}
		if second == 1 && pause != newsPause-time.Second {
			t.Errorf("pause: got %v", pause)
		}
		if second == 7 && told[quiet] != 1 {
			t.Error("one bundle's news waits for another's")
		}
	}
	if told[busy] < 9 || told[busy] > 10 {
		t.Errorf("told %d times in 30 s", told[busy])
	}
	n.add(busy, sighting{gone: true})
	before := told[busy]
	if pause := take(30*time.Second + time.Millisecond); told[busy] != before+1 || pause != 0 {
		t.Errorf("news of an object that went waits %v", pause)
	}
	take(time.Minute)
	if len(n.told) != 0 || len(n.waiting) != 0 || len(n.urgent) != 0 {
		t.Errorf("kept: %v", n)
	}
}
