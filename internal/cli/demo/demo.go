package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/localkube"
)

// waitTimeout is the maximum duration of each wait of the demo. On two cores, every wait takes less than a tenth of it.
const waitTimeout = 3 * time.Minute

// Options are the options of Run.
type Options struct {
	// Exit ends the demo after its last step. Otherwise it runs until the context ends.
	Exit bool
	// Out gets the commands and their output, Err the progress.
	Out, Err io.Writer
	// RunHub runs the hub on the control plane of a kubeconfig until ctx ends. cacheDir is the hub's cache directory; the
	// log of the hub must be hub.log in its parent directory.
	RunHub func(ctx context.Context, kubeconfig, cacheDir string) error
}

// demo is a running demo.
type demo struct {
	terminal
	opts       Options
	dir        string // has all files of the demo
	hub        *localkube.Plane
	pullMember *localkube.Plane
	pushMember *localkube.Plane
	chartsURL  string
}

// Run runs the demo, and returns an error if a step fails. Before it returns, it stops its processes and deletes its
// files.
func Run(ctx context.Context, opts Options) error {
	d := &demo{opts: opts}
	d.out, d.err = opts.Out, opts.Err
	for _, stale := range deleteStaleWorkDirs(os.TempDir()) {
		d.progress("deleted %s of a killed demo", stale)
	}
	dir, err := createWorkDir(os.TempDir())
	if err != nil {
		return fmt.Errorf("create the directory of the demo: %w", err)
	}
	d.dir = dir.path
	defer dir.unlock()
	defer d.cleanUp()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	work, ctx := errgroup.WithContext(ctx)
	if err := d.serveCharts(ctx, work); err != nil {
		return err
	}
	work.Go(func() error {
		defer cancel()
		return d.runSteps(ctx, work)
	})
	return work.Wait()
}

// runSteps runs the steps of the demo in order.
func (d *demo) runSteps(ctx context.Context, work *errgroup.Group) error {
	steps := []struct {
		title string
		run   func(context.Context) error
	}{
		{"Start three Kubernetes control planes: a hub and two members", d.startPlanes},
		{"Start the hub", func(ctx context.Context) error { return d.startHub(ctx, work) }},
		{"Register cluster01 in pull mode: its agent connects to the hub", d.registerPullMember},
		{"Register cluster02 in push mode: the hub connects to it", d.registerPushMember},
		{"Deploy a chart with a CRD and a subchart, and a manifest, to both members", d.deploy},
		{"Show the result", d.show},
	}
	for i, step := range steps {
		d.heading(fmt.Sprintf("%d/%d %s", i+1, len(steps), step.title))
		if err := step.run(ctx); err != nil {
			if errors.Is(ctx.Err(), context.Canceled) {
				return fmt.Errorf("%s: %w", step.title, ctx.Err())
			}
			return fmt.Errorf("%s: %w", step.title, err)
		}
	}
	d.printNextSteps()
	if !d.opts.Exit {
		<-ctx.Done()
	}
	return nil
}

// serveCharts serves the example chart as a Helm repository on a free port of the loopback address.
func (d *demo) serveCharts(ctx context.Context, work *errgroup.Group) error {
	repository, err := examples.Repository()
	if err != nil {
		return fmt.Errorf("package the example chart: %w", err)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen for the chart repository: %w", err)
	}
	d.chartsURL = "http://" + listener.Addr().String()
	server := &http.Server{Handler: repository, ReadHeaderTimeout: 10 * time.Second}
	work.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve charts: %w", err)
		}
		return nil
	})
	work.Go(func() error {
		<-ctx.Done()
		return server.Close()
	})
	return nil
}

func (d *demo) startPlanes(ctx context.Context) error {
	agent, err := localkube.Binary("towline-agent")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	starts, ctx := errgroup.WithContext(ctx)
	for name, plane := range map[string]**localkube.Plane{"hub": &d.hub, "cluster01": &d.pullMember, "cluster02": &d.pushMember} {
		starts.Go(func() error {
			started := time.Now()
			// localkube runs towline-agent for the image of the agent, so that the printed manifest starts a real
			// agent.
			running, err := localkube.Start(ctx, localkube.Options{
				Name: name, Dir: filepath.Join(d.dir, name), Exec: map[string]string{join.DefaultAgentImage: agent},
			})
			if err != nil {
				return err
			}
			*plane = running
			d.progress("%s answers after %.1f s", name, time.Since(started).Seconds())
			return nil
		})
	}
	return starts.Wait()
}

func (d *demo) startHub(ctx context.Context, work *errgroup.Group) error {
	work.Go(func() error {
		if err := d.opts.RunHub(ctx, d.hub.Kubeconfig, filepath.Join(d.dir, "cache")); err != nil && ctx.Err() == nil {
			return fmt.Errorf("run the hub: %w", err)
		}
		return nil
	})
	return d.waitUntil(ctx, "the hub has registered itself", func(ctx context.Context) (string, error) {
		return d.jsonpath(ctx, "sveltoscluster", "mgmt", "mgmt", "{.status.ready}")
	}, "true")
}

func (d *demo) registerPullMember(ctx context.Context) error {
	manifest := filepath.Join(d.dir, "cluster01.yaml")
	register := []string{"sveltosctl", "register", "cluster", "--namespace=edge", "--cluster=cluster01", "--pullmode", "--labels=env=test"}
	if err := d.runPrinted(ctx, commandLine{plane: d.hub, args: register, redirect: manifest}); err != nil {
		return err
	}
	if err := d.runPrinted(ctx, commandLine{plane: d.hub, args: []string{"kubectl", "get", "sveltosclusters", "-A"}}); err != nil {
		return err
	}
	if err := d.runPrinted(ctx, commandLine{plane: d.pullMember, args: []string{"kubectl", "apply", "-f", manifest}}); err != nil {
		return err
	}
	return d.waitUntilReady(ctx, "edge", "cluster01")
}

func (d *demo) registerPushMember(ctx context.Context) error {
	for _, args := range [][]string{
		{"kubectl", "create", "namespace", "cloud"},
		{"sveltosctl", "register", "cluster", "--namespace=cloud", "--cluster=cluster02", "--kubeconfig=" + d.pushMember.Kubeconfig, "--labels=env=test"},
	} {
		if err := d.runPrinted(ctx, commandLine{plane: d.hub, args: args}); err != nil {
			return err
		}
	}
	return d.waitUntilReady(ctx, "cloud", "cluster02")
}

func (d *demo) deploy(ctx context.Context) error {
	profiles, err := examples.Profiles(d.chartsURL)
	if err != nil {
		return fmt.Errorf("read the example profiles: %w", err)
	}
	file := filepath.Join(d.dir, "profiles.yaml")
	if err := os.WriteFile(file, profiles, 0o600); err != nil {
		return fmt.Errorf("write the example profiles: %w", err)
	}
	started := time.Now()
	if err := d.runPrinted(ctx, commandLine{plane: d.hub, args: []string{"kubectl", "apply", "-f", file}}); err != nil {
		return err
	}
	if err := d.waitUntilProvisioned(ctx); err != nil {
		return err
	}
	d.progress("both members have the add-ons %.1f s after the profiles were applied", time.Since(started).Seconds())
	return nil
}

func (d *demo) show(ctx context.Context) error {
	for _, c := range []commandLine{
		{plane: d.hub, args: []string{"kubectl", "get", "sveltosclusters", "-A", "--show-labels"}},
		{plane: d.hub, args: []string{"kubectl", "get", "clusterprofile,clustersummary", "-A"}},
		{plane: d.hub, args: []string{"kubectl", "get", "clustersummaries", "-A", "-o", "wide"}},
		{plane: d.hub, args: []string{"sveltosctl", "show", "addons"}},
		{plane: d.pullMember, args: []string{"kubectl", "get", "deployments", "-A"}},
		{plane: d.pushMember, args: []string{"kubectl", "get", "deployments", "-A"}},
	} {
		if err := d.runPrinted(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// printNextSteps prints the kubeconfigs for the user.
func (d *demo) printNextSteps() {
	d.heading("The demo is complete")
	if d.opts.Exit {
		return
	}
	d.printf("Run kubectl in another terminal with one of these kubeconfigs (kubectl is in the directory of this program):\n\n")
	for _, plane := range []*localkube.Plane{d.hub, d.pullMember, d.pushMember} {
		d.printf("  export KUBECONFIG=%s   # %s\n", plane.Kubeconfig, plane.Name)
	}
	d.printf("\nThe log of the hub is %s. Ctrl-C ends the demo and deletes everything.\n", filepath.Join(d.dir,
		"hub.log"))
}

// cleanUp stops the control planes in parallel and deletes the directory.
func (d *demo) cleanUp() {
	var stops errgroup.Group
	for _, plane := range []*localkube.Plane{d.hub, d.pullMember, d.pushMember} {
		if plane != nil {
			stops.Go(plane.Stop)
		}
	}
	if err := stops.Wait(); err != nil {
		d.progress("stop the control planes: %v", err)
	}
	if err := os.RemoveAll(d.dir); err != nil {
		d.progress("delete %s: %v", d.dir, err)
	}
}
