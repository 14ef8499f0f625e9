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
	"github.com/towline/towline/internal/source"
)

const (
	// firstLook is the shortest time from the start to the first look, and firstJitter how many times that may be added: a hub that starts has
	// better things to do, and hubs that start together shall not ask together.
	firstLook   = time.Minute
	firstJitter = 4.0
	// jitter is the share of the interval that is added to it at most.
	jitter = 0.1
	// atOnce is how many repositories are asked at the same time.
	atOnce = 4
	// repositoryLimit is how long one repository may take, and lookLimit all of them together.
	repositoryLimit = time.Minute
	lookLimit       = 15 * time.Minute
)

// Options say what a Watch looks at.
type Options struct {
	// Hub reads the objects of clusters and ClusterSummaries from a cache; Secrets reads those with the logins of repositories.
	Hub     client.Reader
	Secrets client.Reader
	// Newest asks a repository for the newest versions of charts, as source.Charts.Newest does.
	Newest func(ctx context.Context, r source.Repository, names []string) (map[string]string, error)
	// Shard is the one whose clusters are looked at.
	Shard fleet.Shard
	// Leads is closed while this hub has the lead; one that waits for it tells nothing.
	Leads <-chan struct{}
	// Interval is the time between two looks.
	Interval time.Duration
	Clock    clock.WithTicker
}

// Watch asks the repositories of deployed charts for newer versions, at an interval, and tells as metrics what it learned. Nothing waits for it,
// and nothing fails with it. It keeps what it learned in memory only: a hub that takes over looks again.
type Watch struct {
	Options
	failures *prometheus.CounterVec

	// mu guards what follows.
	mu     sync.Mutex
	newest map[release]string
	looked time.Time
	// failed are the repositories that failures counts.
	failed map[string]bool
}

var (
	_ manager.Runnable     = (*Watch)(nil)
	_ prometheus.Collector = (*Watch)(nil)
)

// release is one release on one cluster, as its summary tells of it.
type release struct {
	cluster         fleet.ID
	namespace, name string
	repository      string
	chart           string
}

// New returns a Watch that has not looked yet.
func New(o Options) *Watch {
	return &Watch{
		Options: o, newest: map[release]string{}, failed: map[string]bool{},
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: metricsNamespace, Name: "outdated_helm_chart_check_failures_total",
			Help: "Looks for newer charts that failed, by repository.",
		}, []string{"repository"}),
	}
}

// Start looks at the interval until ctx ends.
func (w *Watch) Start(ctx context.Context) error {
	next := min(wait.Jitter(firstLook, firstJitter), wait.Jitter(w.Interval, jitter))
	for {
		timer := w.Clock.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C():
		}
		if err := w.Look(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "look for newer charts")
		}
		next = wait.Jitter(w.Interval, jitter)
	}
}

// Look asks every repository once. It fails only if it cannot be told what is deployed; a repository that fails is logged and counted, and
// what was known of its charts stays known.
func (w *Watch) Look(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	questions, err := w.questions(limited)
	if err != nil {
		return err
	}
	var asking errgroup.Group
	asking.SetLimit(atOnce)
	for _, q := range questions {
		asking.Go(func() error {
			w.ask(limited, q)
			return nil
		})
	}
	// None of them returns an error.
	_ = asking.Wait()
	if ctx.Err() != nil {
		return ctx.Err() // the repositories are not to blame
	}
	w.learn(questions)
	return nil
}

// ask puts a question to its repository.
func (w *Watch) ask(ctx context.Context, q *question) {
	if q.failure == nil {
		limited, cancel := context.WithTimeout(ctx, repositoryLimit)
		defer cancel()
		q.answer, q.failure = w.Newest(limited, q.repository, q.names())
	}
	if q.failure != nil {
		log.FromContext(ctx).Error(q.failure, "look for newer charts", "repository", plainURL(q.repository.URL))
	}
}

// learn remembers the answers, and what was known where there is none.
func (w *Watch) learn(questions map[string]*question) {
	w.mu.Lock()
	defer w.mu.Unlock()
	newest, asked := map[release]string{}, map[string]bool{}
	for _, q := range questions {
		repository := plainURL(q.repository.URL)
		asked[repository] = true
		for of, name := range q.charts {
			if version, ok := q.answer[name]; ok {
				newest[of] = version
			} else if known, ok := w.newest[of]; ok {
				newest[of] = known
			}
		}
		if q.failure != nil {
			w.failed[repository] = true
			w.failures.WithLabelValues(repository).Inc()
		}
	}
	for repository := range w.failed {
		if !asked[repository] {
			// Nothing comes from there any more.
			delete(w.failed, repository)
			w.failures.DeleteLabelValues(repository)
		}
	}
	w.newest, w.looked = newest, w.Clock.Now()
}
