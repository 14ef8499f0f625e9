package hub_test

import (
	"os"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
)

// serve is the argument with which the tests start their own binary as a child process of the sandbox.
const serve = "serve"

// TestMain prints the hub's log if HUB_LOG is set.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == serve {
		if err := sandbox.Serve(render.SandboxFunctions(), os.Stdin, os.Stdout); err != nil {
			panic(err)
		}
		return
	}
	log := logr.Discard()
	if os.Getenv("HUB_LOG") != "" {
		log = funcr.New(func(prefix, args string) { _, _ = os.Stderr.WriteString(prefix + " " + args + "\n") }, funcr.Options{LogTimestamp: true})
	}
	ctrl.SetLogger(log)
	m.Run()
}
