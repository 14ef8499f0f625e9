package summaries

import (
	"os"
	"testing"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
)

// serve is the argument with which the tests start their binary as a child of the sandbox.
const serve = "serve"

// pool is the sandbox of the tests.
var pool = sandbox.NewPool([]string{os.Args[0], serve}, clock.RealClock{})

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == serve {
		if err := sandbox.Serve(render.SandboxFunctions(), os.Stdin, os.Stdout); err != nil {
			panic(err)
		}
		return
	}
	m.Run()
}
