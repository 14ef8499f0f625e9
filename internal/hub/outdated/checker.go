package outdated

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/resources"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

const (
	// firstDelay is the minimum delay of the first check. Up to firstJitter times this delay is added, so that hubs that
	// start together do not send requests at the same time.
	firstDelay  = time.Minute
	firstJitter = 4.0
	// jitter is the maximum random addition to the interval, as a factor.
	jitter = 0.1
	// concurrency is the number of repositories that are queried at the same time.
	concurrency = 4
	// repositoryTimeout is the timeout of one repository, and checkTimeout the timeout of a check.
	repositoryTimeout = time.Minute
	checkTimeout      = 15 * time.Minute
)

// Options configures a Checker.
type Options struct {
	// Hub reads the objects of clusters and ClusterSummaries from a cache. Secrets reads the Secrets with the
	// credentials of repositories.
	Hub     client.Reader
	Secrets client.Reader
	// Newest requests the newest versions of charts from a repository, like source.Charts.Newest.
	Newest func(ctx context.Context, r source.Repository, names []string) (map[string]string, error)
	// Shard selects the clusters whose charts are checked.
	Shard fleet.Shard
	// Elected is closed when this hub becomes the leader. Before that, the Checker reports no metrics.
	Elected <-chan struct{}
	// Interval is the time between two checks.
	Interval time.Duration
	Clock    clock.WithTicker
	// Sandbox expands templates, see source.TemplateContext.
	Sandbox *sandbox.Pool
	// Resources reads the objects of templateResourceRefs.
	Resources *resources.Watcher
}

// Checker periodically requests the newest versions of deployed charts from their repositories, and reports the results
// as metrics. No other part of the hub uses them. They are in memory only: a new leader checks again.
type Checker struct {
	Options
	failures *prometheus.CounterVec

	// mu guards the fields below. newest has the newest version of the chart of each release.
	mu        sync.Mutex
	newest    map[release]string
	lastCheck time.Time
	// failed has the repositories with a value in failures.
	failed map[string]bool
}

var (
	_ manager.Runnable     = (*Checker)(nil)
	_ prometheus.Collector = (*Checker)(nil)
)

// release identifies one Helm release on one cluster, and its chart, from the status of its summary.
type release struct {
	cluster         fleet.ID
	namespace, name string
	repository      string
	chart           string
}

// New returns a Checker without results.
func New(o Options) *Checker {
	return &Checker{
		Options: o, newest: map[release]string{}, failed: map[string]bool{},
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: metricsNamespace, Name: "outdated_helm_chart_check_failures_total",
			Help: "Failed checks for newer charts, by repository.",
		}, []string{"repository"}),
	}
}

// Start runs a check at each interval until ctx ends.
func (c *Checker) Start(ctx context.Context) error {
	next := min(wait.Jitter(firstDelay, firstJitter), wait.Jitter(c.Interval, jitter))
	for {
		timer := c.Clock.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C():
		}
		if err := c.Check(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "check for newer charts")
		}
		next = wait.Jitter(c.Interval, jitter)
	}
}

// Check queries every repository once. It returns an error only if it cannot list the deployed charts, or ctx ends. The
// failure of a repository is logged and counted, and its charts keep their earlier results.
func (c *Checker) Check(ctx context.Context) error {
	limitedCtx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	queries, err := c.queries(limitedCtx)
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(concurrency)
	for _, q := range queries {
		group.Go(func() error {
			c.runQuery(limitedCtx, q)
			return nil
		})
	}
	// The functions return no error.
	_ = group.Wait()
	if ctx.Err() != nil {
		return ctx.Err() // the repositories have not failed
	}
	c.saveResults(queries)
	return nil
}

// runQuery sends a query to its repository.
func (c *Checker) runQuery(ctx context.Context, q *query) {
	if q.err == nil {
		limitedCtx, cancel := context.WithTimeout(ctx, repositoryTimeout)
		defer cancel()
		q.versions, q.err = c.Newest(limitedCtx, q.repository, q.names())
	}
	if q.err != nil {
		log.FromContext(ctx).Error(q.err, "check for newer charts", "repository", withoutCredentials(q.repository.URL))
	}
}

// saveResults stores the results. Charts without a result keep the earlier one.
func (c *Checker) saveResults(queries map[string]*query) {
	c.mu.Lock()
	defer c.mu.Unlock()
	newest, queried := map[release]string{}, map[string]bool{}
	for _, q := range queries {
		repository := withoutCredentials(q.repository.URL)
		queried[repository] = true
		for rel, name := range q.charts {
			if version, ok := q.versions[name]; ok {
				newest[rel] = version
			} else if known, ok := c.newest[rel]; ok {
				newest[rel] = known
			}
		}
		if q.err != nil {
			c.failed[repository] = true
			c.failures.WithLabelValues(repository).Inc()
		}
	}
	for repository := range c.failed {
		if !queried[repository] {
			// No deployed chart is from this repository any longer.
			delete(c.failed, repository)
			c.failures.DeleteLabelValues(repository)
		}
	}
	c.newest, c.lastCheck = newest, c.Clock.Now()
}
