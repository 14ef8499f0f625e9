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

// patience bounds each wait of the demo. On two cores none of them takes a tenth of it.
const patience = 3 * time.Minute

// Options say how the demo runs.
type Options struct {
	// Exit ends the demo after success instead of staying until the context ends.
	Exit bool
	// Out gets the transcript, Err the progress.
	Out, Err io.Writer
	// RunHub runs the hub against the control plane with this kubeconfig until ctx ends; cacheDir is for what it
	// fetches.
	RunHub func(ctx context.Context, kubeconfig, cacheDir string) error
}

// Demo is the running state: the directory that holds everything, and the control planes.
type demo struct {
	terminal
	opts           Options
	dir            string
	hub            *localkube.Plane
	pulled, pushed *localkube.Plane
	charts         string
}

// Run plays the demo. It returns an error if a step fails; everything it started has ended when it returns.
func Run(ctx context.Context, opts Options) error {
	d := &demo{opts: opts}
	d.out, d.err = opts.Out, opts.Err
	for _, dead := range removeDead(os.TempDir()) {
		d.progress("removed %s, which a demo left that was killed", dead)
	}
	place, err := makePlace(os.TempDir())
	if err != nil {
		return fmt.Errorf("make the demo's directory: %w", err)
	}
	d.dir = place.dir
	defer place.release()
	defer d.cleanUp()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	work, ctx := errgroup.WithContext(ctx)
	if err := d.serveCharts(ctx, work); err != nil {
		return err
	}
	work.Go(func() error {
		defer cancel()
		return d.play(ctx, work)
	})
	return work.Wait()
}

// play is the demo's story, in order.
func (d *demo) play(ctx context.Context, work *errgroup.Group) error {
	steps := []struct {
		title string
		run   func(context.Context) error
	}{
		{"Start three Kubernetes control planes: a hub and two members", d.startPlanes},
		{"Start the hub", func(ctx context.Context) error { return d.startHub(ctx, work) }},
		{"Register cluster01 in pull mode: its agent dials the hub, it needs no inbound port", d.registerPull},
		{"Register cluster02 in push mode: the hub dials it", d.registerPush},
		{"Declare once what runs on both: a chart with a CRD and a subchart, and a plain manifest", d.deploy},
		{"Look at it", d.show},
	}
	for i, step := range steps {
		d.heading(fmt.Sprintf("%d/%d %s", i+1, len(steps), step.title))
		if err := step.run(ctx); err != nil {
			if errors.Is(ctx.Err(), context.Canceled) {
				return context.Cause(ctx)
			}
			return fmt.Errorf("%s: %w", step.title, err)
		}
	}
	d.goodbye()
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
	d.charts = "http://" + listener.Addr().String()
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
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find our own program: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	starts, ctx := errgroup.WithContext(ctx)
	for name, plane := range map[string]**localkube.Plane{"hub": &d.hub, "cluster01": &d.pulled, "cluster02": &d.pushed} {
		starts.Go(func() error {
			begin := time.Now()
			// The image of the agent runs as this very program, so the printed manifest starts a real agent.
			started, err := localkube.Start(ctx, localkube.Options{
				Name: name, Dir: filepath.Join(d.dir, name), Exec: map[string]string{join.DefaultAgentImage: self},
			})
			if err != nil {
				return err
			}
			*plane = started
			d.progress("%s answers after %.1f s", name, time.Since(begin).Seconds())
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
	return d.until(ctx, "the hub has registered itself", func(ctx context.Context) (string, error) {
		return d.jsonpath(ctx, "sveltoscluster", "mgmt", "mgmt", "{.status.ready}")
	}, "true")
}

func (d *demo) registerPull(ctx context.Context) error {
	manifest := filepath.Join(d.dir, "cluster01.yaml")
	register := []string{"sveltosctl", "register", "cluster", "--namespace=edge", "--cluster=cluster01", "--pullmode", "--labels=env=test"}
	if err := d.typed(ctx, command{plane: d.hub, args: register, redirect: manifest}); err != nil {
		return err
	}
	if err := d.typed(ctx, command{plane: d.hub, args: []string{"kubectl", "get", "sveltosclusters", "-A"}}); err != nil {
		return err
	}
	if err := d.typed(ctx, command{plane: d.pulled, args: []string{"kubectl", "apply", "-f", manifest}}); err != nil {
		return err
	}
	return d.untilReady(ctx, "edge", "cluster01")
}

func (d *demo) registerPush(ctx context.Context) error {
	for _, args := range [][]string{
		{"kubectl", "create", "namespace", "cloud"},
		{"sveltosctl", "register", "cluster", "--namespace=cloud", "--cluster=cluster02", "--kubeconfig=" + d.pushed.Kubeconfig, "--labels=env=test"},
	} {
		if err := d.typed(ctx, command{plane: d.hub, args: args}); err != nil {
			return err
		}
	}
	return d.untilReady(ctx, "cloud", "cluster02")
}

func (d *demo) deploy(ctx context.Context) error {
	profiles, err := examples.Profiles(d.charts)
	if err != nil {
		return fmt.Errorf("read the example profiles: %w", err)
	}
	file := filepath.Join(d.dir, "profiles.yaml")
	if err := os.WriteFile(file, profiles, 0o600); err != nil {
		return fmt.Errorf("write the example profiles: %w", err)
	}
	begin := time.Now()
	if err := d.typed(ctx, command{plane: d.hub, args: []string{"kubectl", "apply", "-f", file}}); err != nil {
		return err
	}
	if err := d.untilProvisioned(ctx); err != nil {
		return err
	}
	d.progress("both members have it %.1f s after the profiles were applied", time.Since(begin).Seconds())
	return nil
}

func (d *demo) show(ctx context.Context) error {
	for _, c := range []command{
		{plane: d.hub, args: []string{"kubectl", "get", "sveltosclusters", "-A", "--show-labels"}},
		{plane: d.hub, args: []string{"kubectl", "get", "clusterprofile,clustersummary", "-A"}},
		{plane: d.hub, args: []string{"kubectl", "get", "clustersummaries", "-A", "-o", "wide"}},
		{plane: d.hub, args: []string{"sveltosctl", "show", "addons"}},
		{plane: d.pulled, args: []string{"kubectl", "get", "deployments", "-A"}},
		{plane: d.pushed, args: []string{"kubectl", "get", "deployments", "-A"}},
	} {
		if err := d.typed(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// goodbye says how to look around.
func (d *demo) goodbye() {
	d.heading("It works")
	if d.opts.Exit {
		return
	}
	d.printf("Look around, in another terminal (kubectl is beside this program):\n\n")
	for _, plane := range []*localkube.Plane{d.hub, d.pulled, d.pushed} {
		d.printf("  export KUBECONFIG=%s   # %s\n", plane.Kubeconfig, plane.Name)
	}
	d.printf("\nThe hub's log is %s. Ctrl-C ends the demo and removes everything.\n", filepath.Join(d.dir, "hub.log"))
}

// cleanUp stops the control planes, in parallel, and removes the directory.
func (d *demo) cleanUp() {
	var stops errgroup.Group
	for _, plane := range []*localkube.Plane{d.hub, d.pulled, d.pushed} {
		if plane != nil {
			stops.Go(plane.Stop)
		}
	}
	if err := stops.Wait(); err != nil {
		d.progress("stopping: %v", err)
	}
	if err := os.RemoveAll(d.dir); err != nil {
		d.progress("remove %s: %v", d.dir, err)
	}
}
