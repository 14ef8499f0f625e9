// Command towline manages a fleet of Kubernetes clusters from one hub. It also answers to the name sveltosctl.
package main

import (
	"context"
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
	return cli.Run(ctx, os.Args, cli.Streams{Out: os.Stdout, Err: os.Stderr})
}
