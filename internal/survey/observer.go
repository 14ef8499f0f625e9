package survey

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

const (
	// DefaultThreshold is how long a change of health must last before it counts: that of the Karmada surface.
	DefaultThreshold = 30 * time.Second
	// healthLimit is how long a cluster may take to say how it is.
	healthLimit = 5 * time.Second
	// discoveryLimit is how long it may take to list its APIs.
	discoveryLimit = 8 * time.Second
	// discoveryInterval is the time between two lists of its APIs.
	discoveryInterval = time.Minute
	// tallyLimit is how long the first observation waits for the sums of nodes and pods.
	tallyLimit = 2 * time.Second
)

// Options change how a cluster is observed.
type Options struct {
	// Clock is asked for the time of an observation. Default: the real one.
	Clock clock.PassiveClock
	// Success is how long a cluster that was not ready must be healthy to be ready again, Failure how long one that was ready must fail to
	// count as not ready. Default: DefaultThreshold each.
	Success, Failure time.Duration
}

// Observer knows how one cluster is. Use NewObserver, and have Run run beside Observe.
type Observer struct {
	opts      Options
	base      *url.URL
	http      *http.Client
	core      typedcorev1.CoreV1Interface
	discovery discovery.DiscoveryInterface
	tally     *tally

	// mu guards what follows: one observation at a time.
	mu sync.Mutex
	// health is how long the cluster has been as it is.
	health streak
	// learned is when its version and APIs were asked for last.
	learned time.Time
	// away are the APIs that did not answer when the APIs were listed last.
	away []clusterv1alpha1.APIEnablement
	// awaited says that an observation has waited for the sums.
	awaited bool
}

// NewObserver returns an Observer of the cluster behind cfg, which is copied. It fails if no client can be made of cfg.
func NewObserver(cfg *rest.Config, opts Options) (*Observer, error) {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	if opts.Success == 0 {
		opts.Success = DefaultThreshold
	}
	if opts.Failure == 0 {
		opts.Failure = DefaultThreshold
	}
	cfg = rest.CopyConfig(cfg)
	// Watches outlast any limit for a whole request, and the cluster's own priority and fairness limits the rate better than a client can.
	cfg.Timeout, cfg.QPS = 0, -1
	cfg.ContentType = runtime.ContentTypeProtobuf
	cfg.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	base, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("read the address of the cluster: %w", err)
	}
	shared, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client of the cluster: %w", err)
	}
	core, err := typedcorev1.NewForConfigAndClient(cfg, shared)
	if err != nil {
		return nil, fmt.Errorf("make a client of the cluster: %w", err)
	}
	limited := *shared
	limited.Timeout = discoveryLimit
	plain := rest.CopyConfig(cfg)
	plain.ContentType, plain.AcceptContentTypes = "", ""
	apis, err := discovery.NewDiscoveryClientForConfigAndClient(plain, &limited)
	if err != nil {
		return nil, fmt.Errorf("make a client of the cluster: %w", err)
	}
	asking := *shared
	asking.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return &Observer{opts: opts, base: base, http: &asking, core: core, discovery: apis, tally: newTally()}, nil
}

// Observe returns what old becomes by what the cluster says now, with models as spec.resourceModels. What cannot be asked is in the
// conditions, or stays as it was; sums that could not be kept for a minute go. It takes a few seconds if the cluster does not answer, and returns old when ctx ends.
func (o *Observer) Observe(ctx context.Context, old clusterv1alpha1.ClusterStatus, models []clusterv1alpha1.ResourceModel) clusterv1alpha1.ClusterStatus {
	o.mu.Lock()
	defer o.mu.Unlock()
	found := o.ask(ctx)
	if ctx.Err() != nil {
		return old
	}
	now := *old.DeepCopy()
	at := o.opts.Clock.Now()
	before := meta.FindStatusCondition(old.Conditions, clusterv1alpha1.ClusterConditionReady)
	o.health = o.health.extend(found.Status == metav1.ConditionTrue, at)
	ready := settle(before, found, o.health, at, thresholds{o.opts.Success, o.opts.Failure})
	note(&now.Conditions, ready, at)
	if found.Status != metav1.ConditionTrue {
		o.tally.excuse()
		return now
	}
	if before == nil || before.Status != metav1.ConditionTrue || len(old.APIEnablements) == 0 || old.KubernetesVersion == "" || at.Sub(o.learned) >= discoveryInterval {
		o.learn(ctx, &now)
	}
	reasons := o.count(ctx, &now, models)
	if ctx.Err() != nil {
		return old
	}
	if len(reasons) > 0 && ready.Status == metav1.ConditionTrue {
		ready.Message += "; " + strings.Join(reasons, "; ")
		note(&now.Conditions, ready, at)
	}
	return now
}

// Failures returns how often in a row the cluster was found not healthy, 0 if it was healthy when it was observed last.
func (o *Observer) Failures() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.health.healthy {
		return 0
	}
	return o.health.times
}

// learn asks for the version and the APIs.
func (o *Observer) learn(ctx context.Context, now *clusterv1alpha1.ClusterStatus) {
	at := o.opts.Clock.Now()
	if version := o.version(ctx); version != "" {
		now.KubernetesVersion = version
	}
	list, err := o.apis()
	now.APIEnablements, o.away = merge(now.APIEnablements, o.away, listed{list, err})
	note(&now.Conditions, completeness(list, err), at)
	o.learned = at
}

// count adds the sums of nodes and pods, once they are known, and returns why some are not known any more.
func (o *Observer) count(ctx context.Context, now *clusterv1alpha1.ClusterStatus, models []clusterv1alpha1.ResourceModel) (reasons []string) {
	if !o.awaited {
		o.awaited = true
		o.tally.wait(ctx, tallyLimit)
	}
	return o.tally.sum(now, models, o.opts.Clock.Now())
}

// note puts condition into conditions. The time of its transition is at if its status differs, and what it was if not.
func note(conditions *[]metav1.Condition, condition metav1.Condition, at time.Time) {
	condition.LastTransitionTime = metav1.NewTime(at)
	if had := meta.FindStatusCondition(*conditions, condition.Type); had != nil && had.Status == condition.Status {
		condition.LastTransitionTime = had.LastTransitionTime
	}
	*conditions = slices.Clone(*conditions)
	meta.SetStatusCondition(conditions, condition)
}
