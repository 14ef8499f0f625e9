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
	// glance is how often a wait looks, and report is how often it says that it still waits.
	glance = 200 * time.Millisecond
	report = 2 * time.Second
)

// terminal shows what the demo types and what happens.
type terminal struct {
	out, err io.Writer
	// mu keeps lines whole: control planes start in parallel.
	mu sync.Mutex
}

// command is one line that the demo types; redirect, if set, is the file that gets its standard output.
type command struct {
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

// typed prints the command as a person would type it, runs it, and prints its output.
func (t *terminal) typed(ctx context.Context, c command) error {
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

// run runs the command with KUBECONFIG set to its plane's and returns its standard output; an error quotes its
// standard error.
func (c command) run(ctx context.Context) ([]byte, error) {
	path, err := program(c.args[0])
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, c.args[1:]...)
	cmd.Args[0] = c.args[0] // our own program answers to the name that was typed
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.plane.Kubeconfig)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(c.args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

func program(name string) (string, error) {
	if name == "kubectl" {
		return localkube.Binary(name)
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find our own program: %w", err)
	}
	return filepath.EvalSymlinks(self)
}

// jsonpath reads one field of an object on the hub; an absent object or field is "".
func (d *demo) jsonpath(ctx context.Context, kind, namespace, name, path string) (string, error) {
	get := command{plane: d.hub, args: []string{"kubectl", "get", kind, name, "-n", namespace, "--ignore-not-found", "-o", "jsonpath=" + path}}
	out, err := get.run(ctx)
	return strings.TrimSpace(string(out)), err
}

func (d *demo) untilReady(ctx context.Context, namespace, cluster string) error {
	return d.until(ctx, cluster+" is ready", func(ctx context.Context) (string, error) {
		return d.jsonpath(ctx, "sveltoscluster", namespace, cluster, "{.status.ready}")
	}, "true")
}

// untilProvisioned waits for the summaries of the example profiles.
func (d *demo) untilProvisioned(ctx context.Context) error {
	for namespace, cluster := range map[string]string{"edge": "cluster01", "cloud": "cluster02"} {
		for profile, feature := range map[string]string{"deploy-hello": "Helm", "team-space": "Resources"} {
			err := d.until(ctx, cluster+" has everything of "+profile, func(ctx context.Context) (string, error) {
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

// until waits until look returns want, and says every two seconds what it sees meanwhile.
func (d *demo) until(ctx context.Context, what string, look func(context.Context) (string, error), want string) error {
	begin, told := time.Now(), time.Now()
	var seen string
	var lookErr error
	err := wait.PollUntilContextTimeout(ctx, glance, patience, true, func(ctx context.Context) (bool, error) {
		seen, lookErr = look(ctx)
		if lookErr == nil && seen == want {
			return true, nil
		}
		if time.Since(told) > report {
			told = time.Now()
			d.progress("waiting until %s: %s", what, cmp.Or(seen, "not yet"))
		}
		return false, nil
	})
	if err != nil {
		return errors.Join(fmt.Errorf("wait until %s: last seen %q: %w", what, seen, err), lookErr)
	}
	d.progress("%s (%.1f s)", what, time.Since(begin).Seconds())
	return nil
}
