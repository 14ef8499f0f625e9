// Command towline manages a fleet of Kubernetes clusters from one hub. It has the commands of sveltosctl and karmadactl
// under these names.
package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/towline/towline/internal/cli"
	"github.com/towline/towline/internal/cli/command"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	// A closed pipe does not end the process: the write returns an error, and the command undoes its changes.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	program, err := os.Executable()
	if err != nil {
		program = os.Args[0]
	}
	return cli.Run(ctx, os.Args, command.Streams{Out: os.Stdout, Err: os.Stderr, Closed: isClosed(os.Stdout), Program: program})
}

// isClosed reports whether the process was started with a closed standard output. The Go runtime opens os.DevNull in
// its place, for reading and writing. A shell opens os.DevNull only for writing.
func isClosed(out *os.File) bool {
	stdout, err := out.Stat()
	if err != nil {
		return true
	}
	null, err := os.Stat(os.DevNull)
	if err != nil || !os.SameFile(stdout, null) {
		return false
	}
	_, err = out.Read(make([]byte, 1))
	return errors.Is(err, io.EOF)
}
