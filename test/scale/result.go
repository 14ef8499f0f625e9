package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/towline/towline/internal/localkube"
)

// value is one measured figure.
type value struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit,omitempty"`
}

// result are the figures of one scenario.
type result struct {
	Scenario string  `json:"scenario"`
	Title    string  `json:"title"`
	Values   []value `json:"values"`
	// Requests are the requests per cluster by kind.
	Requests map[string]float64 `json:"requestsPerCluster"`
	// Stored is what etcd stores at the end for all clusters, by resource: custom resources as JSON, others as protobuf.
	Stored sizes `json:"stored"`

	clusters int
	before   usage
	finished bool
}

// add adds a figure. It does nothing on nil.
func (r *result) add(name string, figure float64, unit string) {
	if r != nil {
		r.Values = append(r.Values, value{name, figure, unit})
	}
}

// addDelays adds percentiles of sorted delays. It does nothing on nil.
func (r *result) addDelays(name string, sorted []time.Duration) {
	if r == nil || len(sorted) == 0 {
		return
	}
	for _, percent := range []int{50, 90, 99, 100} {
		nearest := sorted[(len(sorted)*percent+99)/100-1]
		r.add(fmt.Sprintf("%s p%d", name, percent), nearest.Seconds(), "s")
	}
}

// beginMeasuring begins to measure requests and processor time.
func (r *result) beginMeasuring(ctx context.Context, hub *testHub) (err error) {
	r.before, err = hub.measure(ctx)
	return err
}

// finish adds processor time and requests since beginMeasuring, once. It counts the requests until the hub is quiet:
// ClusterConfigurations are written after the summaries are Provisioned.
func (r *result) finish(ctx context.Context, hub *testHub, clusters int) error {
	if r.finished {
		return nil
	}
	r.finished = true
	after, err := hub.measure(ctx)
	if err != nil {
		return err
	}
	requests := after.requests.Since(r.before.requests)
	if requests.Select(isWriteOfTowline).Total() > 0 {
		if err := hub.awaitQuiet(ctx); err != nil {
			return err
		}
		last, err := hub.plane.CountRequests(ctx)
		if err != nil {
			return err
		}
		requests = last.Since(r.before.requests)
	}
	per := func(n int) float64 { return float64(n) / float64(clusters) }
	r.add("writes per cluster", per(requests.Select(isWriteOfTowline).Total()), "")
	r.add("reads per cluster", per(requests.Select(localkube.Request.IsRead).Total()), "")
	seconds := after.at.Sub(r.before.at).Seconds()
	r.add("duration", seconds, "s")
	// A process that was started meanwhile has less processor time than before.
	if cpu := after.hubCPU - r.before.hubCPU; cpu >= 0 {
		r.add("hub processors", cpu/seconds, "cores")
		r.add("hub processor time", cpu, "s")
	}
	if cpu := after.planeCPU - r.before.planeCPU; cpu >= 0 {
		r.add("API server processors", cpu/seconds, "cores")
		r.add("API server processor time", cpu, "s")
	}
	present, most := residentMiB(hub.hub.Process.Pid)
	r.add("hub memory", present, "MiB")
	r.add("hub memory, most since its start", most, "MiB")
	present, _ = residentMiB(hub.planePID())
	r.add("API server memory", present, "MiB")
	r.Requests = map[string]float64{}
	for request, n := range requests {
		if !isHeartbeat(request) && per(n) >= 0.05 {
			r.Requests[request.String()] += per(n)
		}
	}
	return nil
}

// print writes the result as a table.
func (r *result) print(out io.Writer) {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintf(table, "\n%s: %s\n", r.Scenario, r.Title)
	for _, v := range r.Values {
		_, _ = fmt.Fprintf(table, "  %s\t%.2f %s\n", v.Name, v.Value, v.Unit)
	}
	kinds := make([]string, 0, len(r.Requests))
	for kind := range r.Requests {
		kinds = append(kinds, kind)
	}
	slices.SortFunc(kinds, func(a, b string) int {
		if r.Requests[a] != r.Requests[b] {
			return int(100 * (r.Requests[b] - r.Requests[a]))
		}
		return strings.Compare(a, b)
	})
	for _, kind := range kinds {
		_, _ = fmt.Fprintf(table, "    %s per cluster\t%.2f\n", kind, r.Requests[kind])
	}
	r.printStored(table)
	_ = table.Flush() // the caller cannot do anything about a closed standard output
}
