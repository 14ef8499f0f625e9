package stories

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// turns has one element for each story that may run now.
var turns chan struct{}

// TestMain makes -parallel the number of stories that run at the same time. As the testing package counts, a story with
// parallel subtests gives its place away when they begin, and they queue behind all other stories: its control planes
// run idle for minutes meanwhile. With TOWLINE_UNUSED_RIGHTS=fail in the environment, a run of all stories fails if the
// hub has a right that none of them uses.
func TestMain(m *testing.M) {
	flag.Parse()
	parallel, err := strconv.Atoi(flag.Lookup("test.parallel").Value.String())
	if err != nil {
		panic(err)
	}
	turns = make(chan struct{}, parallel)
	if err := flag.Set("test.parallel", "1000"); err != nil {
		panic(err)
	}
	code := m.Run()
	if os.Getenv("TOWLINE_UNUSED_RIGHTS") == "" {
		return
	}
	isWhole := flag.Lookup("test.run").Value.String() == "" && flag.Lookup("test.skip").Value.String() == ""
	if unused, err := usedRights.unused(); code == 0 && isWhole && (err != nil || len(unused) > 0) {
		panic(fmt.Sprintln("rights of the hub:", err, strings.Join(unused, "\n")))
	}
}

// awaitTurn runs the story and its subtests beside others, as many as -parallel says.
func awaitTurn(t *testing.T) {
	t.Helper()
	t.Parallel()
	turns <- struct{}{}
	t.Cleanup(func() { <-turns })
}
