package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

func main() {
	log.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1) //nolint:forbidigo,gocritic // this is a command
	}
}

// command parses the flags, runs the scenarios, and prints their results.
func command(ctx context.Context, args []string, out, progress io.Writer) error {
	var opts options
	var names []string
	for _, s := range allScenarios() {
		names = append(names, s.name)
	}
	flags := flag.NewFlagSet("scale", flag.ContinueOnError)
	flags.SetOutput(progress)
	flags.IntVar(&opts.clusters, "clusters", 100, "number of simulated pull clusters")
	flags.IntVar(&opts.objects, "objects", 10, "number of ConfigMaps of 200 bytes in a profile")
	flags.IntVar(&opts.profiles, "profiles", 1, "number of profiles in the scenarios new, change and tenth, each with its own content")
	flags.IntVar(&opts.matrixProfiles, "matrix-profiles", 50, "number of profiles in the scenario matrix")
	flags.IntVar(&opts.matrixClusters, "matrix-clusters", 50, "number of clusters in the scenario matrix")
	flags.IntVar(&opts.fillProfiles, "fill-profiles", 100, "number of profiles in the scenario summaries, each on all clusters")
	flags.StringVar(&opts.namespace, "namespace", "", "namespace of all clusters (default a namespace for each)")
	flags.BoolVar(&opts.private, "private", false, "keep the content in a Secret, so that each cluster has a copy of its own")
	flags.DurationVar(&opts.outage, "outage", time.Minute, "time without an API server in the scenario reconnect")
	flags.DurationVar(&opts.idle, "idle", time.Minute, "time for which the scenarios idle and failing measure")
	flags.StringVar(&opts.heapProfile, "heap-profile", "", "`file` for a heap profile of the hub after the last scenario (default none)")
	flags.DurationVar(&opts.timeout, "timeout", 10*time.Minute, "time for each scenario")
	selected := flags.String("scenarios", strings.Join(names, ","), "comma-separated scenarios, in this order; register is needed by all")
	asJSON := flags.Bool("json", false, "print one JSON object per scenario")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	for name, number := range map[string]int{"profiles": opts.profiles, "fill-profiles": opts.fillProfiles} {
		if number < 1 {
			return fmt.Errorf("--%s: %d is less than 1", name, number)
		}
	}
	opts.scenarios = strings.Split(*selected, ",")
	for _, name := range opts.scenarios {
		if !slices.Contains(names, name) {
			return fmt.Errorf("--scenarios: %q is not one of %s", name, strings.Join(names, ", "))
		}
	}
	return measure(ctx, opts, progress, func(r *result) error {
		if *asJSON {
			return json.NewEncoder(out).Encode(r)
		}
		r.print(out)
		return nil
	})
}

// measure runs the scenarios in a temporary directory, which it deletes unless one fails.
func measure(ctx context.Context, opts options, progress io.Writer, report func(*result) error) error {
	dir, err := os.MkdirTemp("", "towline-scale-")
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintln(progress, "files, kept after a failure:", dir) // progress is for people
	if err := measureIn(ctx, dir, opts, progress, report); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// measureIn starts the hub, runs the scenarios and reports each result.
func measureIn(ctx context.Context, dir string, opts options, progress io.Writer, report func(*result) error) error {
	hub, err := startHub(ctx, dir)
	if err != nil {
		return err
	}
	defer hub.stop()
	agentsCtx, endAgents := context.WithCancel(ctx)
	r := &run{options: opts, hub: hub, fleet: newFleet(agentsCtx, hub)}
	defer r.fleet.agents.Wait()
	defer endAgents()
	r.fleet.watch(agentsCtx)
	if _, err := r.fleet.await(ctx, "the hub registers itself", 1, time.Now(), func() []time.Time {
		if at, ok := r.fleet.ready["mgmt"]; ok {
			return []time.Time{at}
		}
		return nil
	}); err != nil {
		return err
	}
	if r.storedBefore, err = hub.etcd.readSizes(ctx); err != nil {
		return err
	}
	for _, s := range allScenarios() {
		if !slices.Contains(opts.scenarios, s.name) {
			continue
		}
		_, _ = fmt.Fprintf(progress, "%s: %s\n", s.name, s.title) // progress is for people
		if err := r.runScenario(ctx, s, report); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	if opts.heapProfile == "" {
		return nil
	}
	if err := hub.writeHeapProfile(ctx, opts.heapProfile); err != nil {
		return fmt.Errorf("--heap-profile: %w", err)
	}
	return nil
}

func (r *run) runScenario(ctx context.Context, s scenario, report func(*result) error) error {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	if err := r.hub.awaitQuiet(ctx); err != nil {
		return err
	}
	result := &result{Scenario: s.name, Title: s.title}
	if err := result.beginMeasuring(ctx, r.hub); err != nil {
		return err
	}
	if err := s.run(ctx, r, result); err != nil {
		_ = report(result) // the error of the scenario counts
		return err
	}
	if err := result.finish(ctx, r.hub, r.clusters); err != nil {
		return err
	}
	if err := r.addStored(ctx, result); err != nil {
		return err
	}
	r.fleet.mu.Lock()
	result.add("failed requests of agents", float64(r.fleet.errors), "")
	r.fleet.errors = 0
	r.fleet.mu.Unlock()
	return report(result)
}
