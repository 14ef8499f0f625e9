package stories

import (
	"flag"
	"strconv"
	"testing"
)

// turns has one element for each story that may run now.
var turns chan struct{}

// TestMain makes -parallel the number of stories that run at the same time. As the testing package counts, a story with
// parallel subtests gives its place away when they begin, and they queue behind all other stories: its control planes
// run idle for minutes meanwhile.
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
	m.Run()
}

// awaitTurn runs the story and its subtests beside others, as many as -parallel says.
func awaitTurn(t *testing.T) {
	t.Helper()
	t.Parallel()
	turns <- struct{}{}
	t.Cleanup(func() { <-turns })
}
