package summaries

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

func TestOwnStatusWritesAreFiltered(t *testing.T) {
	t.Parallel()
	f, name := &ownWrites{}, types.NamespacedName{Namespace: "fleet", Name: "web"}
	now := time.Now()
	if f.observeEvent(name, "1") {
		t.Error("an event before any write counts as an own write")
	}
	f.begin(name)
	if !f.observeEvent(name, "10") {
		t.Error("an event during a write does not count as an own write")
	}
	if f.end(name, "10", now) {
		t.Error("the event of an own write counts as missed")
	}
	if !f.observeEvent(name, "9") || !f.observeEvent(name, "10") || f.observeEvent(name, "11") {
		t.Error("events up to the last write are not own writes, or later ones are")
	}
	f.begin(name)
	f.observeEvent(name, "13")
	if !f.end(name, "12", now) {
		t.Error("an event of a later write of somebody else was missed")
	}
	f.begin(name)
	f.observeEvent(name, "14")
	if !f.end(name, "", now) {
		t.Error("an event during a write that failed was missed")
	}
	if !f.isBehind(name, "11", now) || f.isBehind(name, "12", now) || f.isBehind(name, "13", now) || f.isBehind(name, "11", now.Add(maxCacheLag)) {
		t.Error("a cache is behind, for a time, without the last write, and not with it")
	}
	f.forget(name)
	if f.observeEvent(name, "9") {
		t.Error("a summary that was forgotten is still known")
	}
}
