package localkube

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"k8s.io/client-go/rest"
)

// Request is a kind of request to an API server.
type Request struct {
	// Verb is GET, LIST, WATCH, POST, PUT, PATCH, APPLY, DELETE or DELETECOLLECTION.
	Verb string
	// Group is the API group, "" for the core.
	Group string
	// Resource is the plural, with the subresource after a slash.
	Resource string
}

// String returns the request without its group, for example "PATCH clustersummaries/status".
func (r Request) String() string { return r.Verb + " " + r.Resource }

// IsWrite returns whether the request changes objects.
func (r Request) IsWrite() bool {
	return r.Verb != "GET" && r.Verb != "LIST" && r.Verb != "WATCH"
}

// IsRead returns whether the request reads objects once, so it is false for a watch.
func (r Request) IsRead() bool { return r.Verb == "GET" || r.Verb == "LIST" }

// RequestCounts is the number of requests of each kind.
type RequestCounts map[Request]int

var requestMetric = regexp.MustCompile(`(?m)^apiserver_request_total\{(.*)\} ([0-9.e+]+)$`)

// CountRequests returns the requests for resources that the API server has answered since its start, from its metrics.
// A watch counts when it ends.
func (p *Plane) CountRequests(ctx context.Context) (RequestCounts, error) {
	metrics, err := p.readMetrics(ctx)
	if err != nil {
		return nil, fmt.Errorf("metrics of %s: %w", p.Name, err)
	}
	counts := RequestCounts{}
	for _, line := range requestMetric.FindAllStringSubmatch(metrics, -1) {
		labels := map[string]string{}
		for pair := range strings.SplitSeq(line[1], ",") {
			name, value, _ := strings.Cut(pair, "=")
			labels[name] = strings.Trim(value, `"`)
		}
		if labels["resource"] == "" {
			continue
		}
		count, err := strconv.ParseFloat(line[2], 64)
		if err != nil {
			return nil, fmt.Errorf("metrics of %s: %w", p.Name, err)
		}
		resource := strings.TrimSuffix(labels["resource"]+"/"+labels["subresource"], "/")
		counts[Request{Verb: labels["verb"], Group: labels["group"], Resource: resource}] += int(count)
	}
	return counts, nil
}

func (p *Plane) readMetrics(ctx context.Context) (string, error) {
	httpClient, err := rest.HTTPClientFor(p.Config)
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.Config.Host+"/metrics", nil)
	if err != nil {
		return "", err
	}
	response, err := httpClient.Do(req)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("the API server answers %s", response.Status)
	}
	raw, err := io.ReadAll(response.Body)
	return string(raw), err
}

// Since returns c minus the earlier counts before, without the kinds that did not grow.
func (c RequestCounts) Since(before RequestCounts) RequestCounts {
	growth := RequestCounts{}
	for request, count := range c {
		if n := count - before[request]; n > 0 {
			growth[request] = n
		}
	}
	return growth
}

// Select returns the counts of the requests for which selected returns true.
func (c RequestCounts) Select(selected func(Request) bool) RequestCounts {
	found := maps.Clone(c)
	maps.DeleteFunc(found, func(r Request, _ int) bool { return !selected(r) })
	return found
}

// Total returns the number of all requests.
func (c RequestCounts) Total() int {
	total := 0
	for _, count := range c {
		total += count
	}
	return total
}

// String returns a line for each kind of request, the most frequent first.
func (c RequestCounts) String() string {
	requests := slices.SortedFunc(maps.Keys(c), func(a, b Request) int {
		if c[a] != c[b] {
			return c[b] - c[a]
		}
		return strings.Compare(a.String(), b.String())
	})
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, r := range requests {
		_, _ = fmt.Fprintf(table, "  %s\t%d\n", r, c[r]) // a strings.Builder returns no error
	}
	_ = table.Flush() // as above
	return text.String()
}
