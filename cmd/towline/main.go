// Command towline manages a fleet of Kubernetes clusters from one hub. It also answers to the name sveltosctl.
package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/towline/towline/internal/cli"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	// A reader that goes away must not end the process: what cannot be printed is an error, after which a command undoes what it did.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	return cli.Run(ctx, os.Args, cli.Streams{Out: os.Stdout, Err: os.Stderr, Closed: closed(os.Stdout)})
}

// closed says whether the process was started without standard output. The runtime opens os.DevNull in its place then, for reading too, which
// nobody who sends the output there on purpose does.
func closed(out *os.File) bool {
	now, err := out.Stat()
	if err != nil {
		return true
	}
	null, err := os.Stat(os.DevNull)
	if err != nil || !os.SameFile(now, null) {
		return false
	}
	_, err = out.Read(make([]byte, 1))
	return errors.Is(err, io.EOF)
}
