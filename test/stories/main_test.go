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

// longStories take minutes, so they start before the others: if the last story to start is a long one, all wait for it.
var longStories = []string{
	"TestHelmHooks/push", "TestHelmHooks/pull", "TestNothingLostHub", "TestNothingLostAgent", "TestKarmadaTimes", "TestNothingLostWithoutHub", "TestMany",
	"TestFailingBundleIsQuiet", "TestDeregisterPull", "TestDeregisterPush", "TestKarmadaFaults", "TestKarmadaIdentity", "TestHelmCommands", "TestRegisterFailsEverywhere",
}

// turns limits the stories that run at the same time.
var turns = &turnQueue{}

// turnQueue admits a number of stories at the same time. If several wait, longStories are first.
type turnQueue struct {
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
func (q *turnQueue) wait(name string) {
	story := waitingStory{name: name, start: make(chan struct{})}
	q.change(func() { q.waiting = append(q.waiting, story) })
	<-story.start
}

// end admits another story after the end of one.
func (q *turnQueue) end() { q.change(func() { q.free++ }) }

// change changes the queue, and admits stories.
func (q *turnQueue) change(f func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	f()
	for ; q.free > 0 && len(q.waiting) > 0; q.free-- {
		next := max(0, slices.IndexFunc(q.waiting, func(s waitingStory) bool { return slices.Contains(longStories, s.name) }))
		close(q.waiting[next].start)
		q.waiting = slices.Delete(q.waiting, next, next+1)
	}
}

// TestMain makes -parallel the number of stories that run at the same time. As the testing package counts, a story with
// parallel subtests gives its place away when they begin, and they queue behind all other stories: its control planes
// run idle for minutes meanwhile. A run of all stories fails if the hub has a right that none of them uses.
func TestMain(m *testing.M) {
	flag.Parse()
	parallel, err := strconv.Atoi(flag.Lookup("test.parallel").Value.String())
	if err != nil {
		panic(err)
	}
	turns.free = parallel
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

// isRunOfAll returns whether all stories run, and none is skipped: without networks, some stories are.
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

// awaitTurn runs the story and its subtests beside others, as many as -parallel says.
func awaitTurn(t *testing.T) {
	t.Helper()
	t.Parallel()
	turns.wait(t.Name())
	t.Cleanup(turns.end)
}
