// Command towline-agent runs the agents of clusters in pull mode. It has only these commands of towline.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/towline/towline/internal/cli/agents"
	"github.com/towline/towline/internal/cli/command"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	program, err := os.Executable()
	if err != nil {
		program = os.Args[0]
	}
	return agents.Run(ctx, os.Args, command.Streams{Out: os.Stdout, Err: os.Stderr, Program: program})
}
