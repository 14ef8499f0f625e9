package demo

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/towline/towline/internal/localkube"
)

const (
	// pollInterval is the interval between two reads of waitUntil.
	pollInterval = 200 * time.Millisecond
	// progressInterval is the minimum interval between two progress lines of waitUntil.
	progressInterval = 2 * time.Second
)

// terminal prints the commands of the demo, their output, and progress.
type terminal struct {
	out, err io.Writer
	// mu is held while a line is printed, since control planes start in parallel.
	mu sync.Mutex
}

// commandLine is a command of the demo, with KUBECONFIG set to the kubeconfig of plane. redirect is a file for its
// standard output, or "".
type commandLine struct {
	plane    *localkube.Plane
	args     []string
	redirect string
}

func (t *terminal) printf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, _ = fmt.Fprintf(t.out, format, args...)
}

func (t *terminal) heading(title string) { t.printf("\n== %s\n", title) }

func (t *terminal) progress(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, _ = fmt.Fprintf(t.err, "   "+format+"\n", args...)
}

// runPrinted prints the command line, runs the command, and prints its output.
func (t *terminal) runPrinted(ctx context.Context, c commandLine) error {
	line := strings.Join(c.args, " ")
	if c.redirect != "" {
		line += " > " + c.redirect
	}
	t.printf("\n%s $ %s\n", c.plane.Name, line)
	out, err := c.run(ctx)
	if err != nil {
		return err
	}
	if c.redirect != "" {
		if err := os.WriteFile(c.redirect, out, 0o600); err != nil {
			return fmt.Errorf("write %s: %w", c.redirect, err)
		}
		return nil
	}
	t.printf("%s\n", bytes.TrimRight(out, "\n"))
	return nil
}

// run runs the command and returns its standard output. Errors contain its standard error.
func (c commandLine) run(ctx context.Context) ([]byte, error) {
	path, err := programPath(c.args[0])
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, c.args[1:]...)
	cmd.Args[0] = c.args[0] // the name selects the root command, see cli.Run
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.plane.Kubeconfig)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(c.args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

// programPath returns the path of kubectl, or of this program for all other names.
func programPath(name string) (string, error) {
	if name == "kubectl" {
		return localkube.Binary(name)
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the path of this program: %w", err)
	}
	return filepath.EvalSymlinks(self)
}

// jsonpath returns a field of an object on the hub, "" if the object or the field does not exist.
func (d *demo) jsonpath(ctx context.Context, kind, namespace, name, path string) (string, error) {
	get := commandLine{plane: d.hub, args: []string{"kubectl", "get", kind, name, "-n", namespace, "--ignore-not-found", "-o", "jsonpath=" + path}}
	out, err := get.run(ctx)
	return strings.TrimSpace(string(out)), err
}

func (d *demo) waitUntilReady(ctx context.Context, namespace, cluster string) error {
	return d.waitUntil(ctx, cluster+" is ready", func(ctx context.Context) (string, error) {
		return d.jsonpath(ctx, "sveltoscluster", namespace, cluster, "{.status.ready}")
	}, "true")
}

// waitUntilProvisioned waits for the ClusterSummaries of the example profiles.
func (d *demo) waitUntilProvisioned(ctx context.Context) error {
	for namespace, cluster := range map[string]string{"edge": "cluster01", "cloud": "cluster02"} {
		for profile, feature := range map[string]string{"deploy-hello": "Helm", "team-space": "Resources"} {
			err := d.waitUntil(ctx, cluster+" has the add-ons of "+profile, func(ctx context.Context) (string, error) {
				return d.jsonpath(ctx, "clustersummary", namespace, profile+"-sveltos-"+cluster,
					`{range .status.featureSummaries[*]}{.featureID} is {.status} {.failureMessage}{end}`)
			}, feature+" is Provisioned")
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// waitUntil waits until read returns want, and prints the current value as progress. condition describes want in
// messages.
func (d *demo) waitUntil(ctx context.Context, condition string, read func(context.Context) (string, error), want string) error {
	started, lastProgress := time.Now(), time.Now()
	var current string
	var readErr error
	err := wait.PollUntilContextTimeout(ctx, pollInterval, waitTimeout, true, func(ctx context.Context) (bool, error) {
		current, readErr = read(ctx)
		if readErr == nil && current == want {
			return true, nil
		}
		if time.Since(lastProgress) > progressInterval {
			lastProgress = time.Now()
			d.progress("waiting until %s: %s", condition, cmp.Or(current, "not yet"))
		}
		return false, nil
	})
	if err != nil {
		return errors.Join(fmt.Errorf("wait until %s: last value %q: %w", condition, current, err), readErr)
	}
	d.progress("%s (%.1f s)", condition, time.Since(started).Seconds())
	return nil
}
