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
	// firstDelay is the shortest delay of the first check, and firstJitter the factor of the random addition to it. So
	// a starting hub has time for its other work, and hubs that start together do not send requests at the same time.
	firstDelay  = time.Minute
	firstJitter = 4.0
	// jitter is the largest random addition to the interval, as a factor.
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
	// Elected is closed when this hub becomes the leader. Before, the Checker reports no metrics.
	Elected <-chan struct{}
	// Interval is the time between two checks.
	Interval time.Duration
	Clock    clock.WithTicker
	// Sandbox expands templates, see source.Subject.
	Sandbox *sandbox.Pool
	// Resources reads the objects of templateResourceRefs.
	Resources *resources.Watcher
}

// Checker requests the newest versions of deployed charts from their repositories at an interval, and reports the
// results as metrics. No other part of the hub depends on it. It has the results in memory only: a new leader checks
// again.
type Checker struct {
	Options
	failures *prometheus.CounterVec

	// mu guards the fields below.
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

// release is one release on one cluster, from the status of its summary.
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
func (w *Checker) Start(ctx context.Context) error {
	next := min(wait.Jitter(firstDelay, firstJitter), wait.Jitter(w.Interval, jitter))
	for {
		timer := w.Clock.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C():
		}
		if err := w.Check(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "check for newer charts")
		}
		next = wait.Jitter(w.Interval, jitter)
	}
}

// Check queries every repository once. It fails only if it cannot list the deployed charts. The failure of a repository
// is logged and counted, and the earlier results of its charts stay.
func (w *Checker) Check(ctx context.Context) error {
	limitedCtx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	queries, err := w.queries(limitedCtx)
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(concurrency)
	for _, q := range queries {
		group.Go(func() error {
			w.run(limitedCtx, q)
			return nil
		})
	}
	// The functions return no error.
	_ = group.Wait()
	if ctx.Err() != nil {
		return ctx.Err() // a canceled check is no failure of a repository
	}
	w.saveResults(queries)
	return nil
}

// run sends a query to its repository.
func (w *Checker) run(ctx context.Context, q *query) {
	if q.err == nil {
		limitedCtx, cancel := context.WithTimeout(ctx, repositoryTimeout)
		defer cancel()
		q.versions, q.err = w.Newest(limitedCtx, q.repository, q.names())
	}
	if q.err != nil {
		log.FromContext(ctx).Error(q.err, "check for newer charts", "repository", plainURL(q.repository.URL))
	}
}

// saveResults stores the results. Charts without a result keep the earlier one.
func (w *Checker) saveResults(queries map[string]*query) {
	w.mu.Lock()
	defer w.mu.Unlock()
	newest, queried := map[release]string{}, map[string]bool{}
	for _, q := range queries {
		repository := plainURL(q.repository.URL)
		queried[repository] = true
		for rel, name := range q.charts {
			if version, ok := q.versions[name]; ok {
				newest[rel] = version
			} else if known, ok := w.newest[rel]; ok {
				newest[rel] = known
			}
		}
		if q.err != nil {
			w.failed[repository] = true
			w.failures.WithLabelValues(repository).Inc()
		}
	}
	for repository := range w.failed {
		if !queried[repository] {
			// No deployed chart is from this repository any longer.
			delete(w.failed, repository)
			w.failures.DeleteLabelValues(repository)
		}
	}
	w.newest, w.lastCheck = newest, w.Clock.Now()
}
