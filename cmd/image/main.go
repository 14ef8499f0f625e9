// Command image builds the container image of Towline, for the hub and for agents, without a container engine. It
// writes the image to an archive, to a registry, or to both.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		return 1
	}
	return 0
}

// options are the flags of the command.
type options struct {
	reference    string
	platforms    []string
	ldflags      string
	certificates string
	licenses     []string
	archive      string
	push         bool
	plainHTTP    bool
}

func newCommand() *cobra.Command {
	o := options{}
	cmd := &cobra.Command{
		Use:   "image --image=<repository>:<tag> [--archive=<file>] [--push]",
		Short: "Build the image of Towline from the module in the working directory",
		Long: `Build the image of Towline from the module in the working directory, for each platform. It needs the Go
compiler only. The same source gives the same image. --archive writes a tar of an OCI layout, for docker load,
podman load, ctr image import and k3s. --push pushes the image to the registry in its name, with the credentials of docker login,
podman login or helm registry login.`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.archive == "" && !o.push {
				return errors.New("pass --archive, --push or both")
			}
			if _, err := os.Stat(o.certificates); errors.Is(err, fs.ErrNotExist) && !cmd.Flags().Changed("certificates") {
				cmd.PrintErrf("warning: %s does not exist: the image trusts no certificate authority\n", o.certificates)
				o.certificates = ""
			}
			return o.build(cmd.Context(), o.compile)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.reference, "image", "towline:latest", "`name` of the image, with its tag")
	flags.StringSliceVar(&o.platforms, "platforms", []string{"linux/amd64", "linux/arm64"}, "`platforms` to build for")
	flags.StringVar(&o.ldflags, "ldflags", "", "`flags` of the linker")
	flags.StringVar(&o.certificates, "certificates", "/etc/ssl/certs/ca-certificates.crt",
		"`file` with the certificate authorities that the image trusts, in PEM; empty for none")
	flags.StringSliceVar(&o.licenses, "licenses", []string{"LICENSE", "NOTICE"}, "`files` to put into /licenses of the image")
	flags.StringVar(&o.archive, "archive", "", "`file` to write the image to")
	flags.BoolVar(&o.push, "push", false, "push the image to its registry")
	flags.BoolVar(&o.plainHTTP, "plain-http", false, "push over http")
	return cmd
}

// compiler compiles a command for a platform and writes it to a file.
type compiler func(ctx context.Context, platform, command, file string) error

// compile runs go build.
func (o options) compile(ctx context.Context, platform, command, file string) error {
	system, architecture, _ := strings.Cut(platform, "/")
	arguments := []string{"build", "-trimpath", "-ldflags=" + o.ldflags, "-o", file, "./cmd/" + command}
	cmd := exec.CommandContext(ctx, "go", arguments...) //nolint:gosec // built from flags
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+system, "GOARCH="+architecture)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return cmd.Run()
}
