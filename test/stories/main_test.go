package stories

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/towline/towline/internal/localkube"
)

// longStories take minutes, so they start before the others: if the last story to start is a long one, the run waits
// for it.
var longStories = []string{
	"TestNothingLostHub", "TestNothingLostAgent", "TestKarmadaTimes", "TestNothingLostWithoutHub", "TestMany",
	"TestFailingBundleIsQuiet", "TestDeregisterPull", "TestDeregisterPush", "TestKarmadaFaults", "TestKarmadaIdentity", "TestHelmCommands", "TestRegisterFailsEverywhere",
}

// slots limits the stories that run at the same time.
var slots = &slotQueue{}

// slotQueue admits a number of stories at the same time. If several wait, longStories are first.
type slotQueue struct {
	mu      sync.Mutex
	free    int
	waiting []waitingStory
}

// waitingStory is a story that may run once start is closed.
type waitingStory struct {
	name  string
	start chan struct{}
}

// wait returns when the story may run.
func (q *slotQueue) wait(name string) {
	story := waitingStory{name: name, start: make(chan struct{})}
	q.change(func() { q.waiting = append(q.waiting, story) })
	<-story.start
}

// end returns the slot of a story that has ended.
func (q *slotQueue) end() { q.change(func() { q.free++ }) }

// change changes the queue with f, and admits stories.
func (q *slotQueue) change(f func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	f()
	for ; q.free > 0 && len(q.waiting) > 0; q.free-- {
		next := max(0, slices.IndexFunc(q.waiting, func(s waitingStory) bool { return slices.Contains(longStories, s.name) }))
		close(q.waiting[next].start)
		q.waiting = slices.Delete(q.waiting, next, next+1)
	}
}

// TestMain makes -parallel the number of stories that run at the same time. In the testing package, a story with
// parallel subtests gives up its slot when they begin, and they queue behind all other stories: its control planes are
// idle for minutes meanwhile. A run of all stories fails if no story uses a right of the hub.
func TestMain(m *testing.M) {
	flag.Parse()
	parallel, err := strconv.Atoi(flag.Lookup("test.parallel").Value.String())
	if err != nil {
		panic(err)
	}
	slots.free = parallel
	if err := flag.Set("test.parallel", "1000"); err != nil {
		panic(err)
	}
	if code := m.Run(); code != 0 || !isRunOfAll(func(name string) string { return flag.Lookup("test." + name).Value.String() }, os.Getenv) {
		return
	}
	if unused, err := usedRights.unused(); err != nil || len(unused) > 0 {
		panic(fmt.Sprintln("rights of the hub:", err, strings.Join(unused, "\n")))
	}
}

// isRunOfAll returns whether no story is skipped: without networks, some stories are.
func isRunOfAll(flagValue, getenv func(string) string) bool {
	for _, selection := range []string{"run", "skip", "list"} {
		if flagValue(selection) != "" {
			return false
		}
	}
	return flagValue("short") == "false" && getenv(localkube.NetworksVariable) == "required"
}

func TestRunOfAll(t *testing.T) {
	t.Parallel()
	all := map[string]string{"short": "false", localkube.NetworksVariable: "required"}
	for name, value := range map[string]string{"": "", "run": "TestHelm", "skip": "TestHelm", "list": ".", "short": "true", localkube.NetworksVariable: ""} {
		get := func(asked string) string {
			if asked == name {
				return value
			}
			return all[asked]
		}
		if got, want := isRunOfAll(get, get), name == ""; got != want {
			t.Errorf("%s=%s: got %t, want %t", name, value, got, want)
		}
	}
}

// awaitSlot runs the story and its subtests in parallel with others, up to the number of -parallel.
func awaitSlot(t *testing.T) {
	t.Helper()
	t.Parallel()
	slots.wait(t.Name())
	t.Cleanup(slots.end)
}
