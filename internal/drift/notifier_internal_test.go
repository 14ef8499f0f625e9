package drift

import (
	"testing"
	"time"

	"github.com/towline/towline/internal/bundle"
)

func TestNotificationsArePaced(t *testing.T) {
	t.Parallel()
	n := newChangeNotifier()
	busy, quiet := bundle.ID{RequestorName: "busy"}, bundle.ID{RequestorName: "quiet"}
	notified := map[bundle.ID]int{}
	start := time.Now()
	take := func(after time.Duration) time.Duration {
		ids, pause := n.takeDue(start.Add(after))
		for _, id := range ids {
			notified[id]++
		}
		return pause
	}
	// A status that changes each second, for half a minute.
	for second := range 30 {
		n.add(busy, observation{})
		if second == 7 {
			n.add(quiet, observation{})
		}
		pause := take(time.Duration(second) * time.Second)
		if second == 0 && notified[busy] != 1 {
			t.Error("the first notification waits")
		}
		if second == 1 && pause != notifyInterval-time.Second {
			t.Errorf("pause: got %v", pause)
		}
		if second == 7 && notified[quiet] != 1 {
			t.Error("the notification of one bundle waits for another's")
		}
	}
	if notified[busy] < 9 || notified[busy] > 10 {
		t.Errorf("notified %d times in 30 s", notified[busy])
	}
	n.add(busy, observation{deleted: true})
	before := notified[busy]
	if pause := take(30*time.Second + time.Millisecond); notified[busy] != before+1 || pause != 0 {
		t.Errorf("the notification of a deletion waits %v", pause)
	}
	take(time.Minute)
	if len(n.notified) != 0 || len(n.pending) != 0 || len(n.urgent) != 0 {
		t.Errorf("kept: %v", n)
	}
}
