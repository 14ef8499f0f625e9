package clusterstatus

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// DefaultThreshold is how long a change of health must last before the condition Ready changes. It is Karmada's
	// default.
	DefaultThreshold = 30 * time.Second
	// healthTimeout limits checkHealth and readVersion.
	healthTimeout = 5 * time.Second
	// discoveryTimeout limits each request of a discovery.
	discoveryTimeout = 8 * time.Second
	// discoveryInterval is the time between two discoveries of a healthy cluster.
	discoveryInterval = time.Minute
	// syncTimeout limits how long the first observation waits for the counters of nodes and pods.
	syncTimeout = 2 * time.Second
)

// Options configure an Observer.
type Options struct {
	// Clock gives the time of each observation. Default: the real clock.
	Clock clock.PassiveClock
	// SuccessThreshold is the time for which a cluster that is not ready must be healthy to become ready, and
	// FailureThreshold the time for which a ready cluster must be unhealthy to become not ready. Default of both:
	// DefaultThreshold.
	SuccessThreshold, FailureThreshold time.Duration
	// Memory is for the counters of nodes and pods. Default: no limit. Run closes it.
	Memory *kube.Reservation
}

// Observer observes one cluster. Create it with NewObserver and call Run in a goroutine beside Observe. Its methods may
// be called concurrently.
type Observer struct {
	opts            Options
	baseURL         *url.URL
	httpClient      *http.Client
	coreClient      typedcorev1.CoreV1Interface
	discoveryClient *kube.Discovery
	counters        *counters

	// mu guards the fields below. Observe holds it, so observations run one after the other.
	mu sync.Mutex
	// health is the current series of equal health results.
	health streak
	// discoveredAt is the time of the last discovery.
	discoveredAt time.Time
	// unavailableAPIs are the APIs that failed in the last discovery.
	unavailableAPIs []clusterv1alpha1.APIEnablement
	// hasWaitedForSync is true once an observation has waited for the counters.
	hasWaitedForSync bool
}

// NewObserver returns an Observer for the cluster of cfg, which it copies. It fails if cfg is invalid.
func NewObserver(cfg *rest.Config, opts Options) (*Observer, error) {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	if opts.SuccessThreshold == 0 {
		opts.SuccessThreshold = DefaultThreshold
	}
	if opts.FailureThreshold == 0 {
		opts.FailureThreshold = DefaultThreshold
	}
	cfg = rest.CopyConfig(cfg)
	// A timeout would end watches. API Priority and Fairness of the cluster limits the rate of requests.
	cfg.Timeout, cfg.QPS = 0, -1
	cfg.ContentType = runtime.ContentTypeProtobuf
	cfg.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	baseURL, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("parse the address of the cluster: %w", err)
	}
	httpClient, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("create a client for the cluster: %w", err)
	}
	coreClient, err := typedcorev1.NewForConfigAndClient(cfg, httpClient)
	if err != nil {
		return nil, fmt.Errorf("create a client for the cluster: %w", err)
	}
	discoveryHTTPClient := *httpClient
	discoveryHTTPClient.Timeout = discoveryTimeout
	jsonConfig := rest.CopyConfig(cfg)
	jsonConfig.ContentType, jsonConfig.AcceptContentTypes = "", ""
	discoveryClient, err := kube.NewDiscovery(jsonConfig, &discoveryHTTPClient)
	if err != nil {
		return nil, fmt.Errorf("create a client for the cluster: %w", err)
	}
	healthHTTPClient := *httpClient
	healthHTTPClient.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	o := &Observer{opts: opts, baseURL: baseURL, httpClient: &healthHTTPClient, coreClient: coreClient, discoveryClient: discoveryClient, counters: newCounters()}
	o.counters.reservation = opts.Memory
	return o, nil
}

// Observe returns the new status of the cluster. old is its current status, which stays unchanged, and models are its
// spec.resourceModels. Failures are reported in conditions. Data that cannot be read keeps its old value, but stale
// counters are removed. Observe takes a few seconds if the cluster does not answer, and returns old if ctx ends.
func (o *Observer) Observe(ctx context.Context, old clusterv1alpha1.ClusterStatus, models []clusterv1alpha1.ResourceModel) clusterv1alpha1.ClusterStatus {
	o.mu.Lock()
	defer o.mu.Unlock()
	observed := o.checkHealth(ctx)
	if ctx.Err() != nil {
		return old
	}
	status := *old.DeepCopy()
	now := o.opts.Clock.Now()
	oldReady := meta.FindStatusCondition(old.Conditions, clusterv1alpha1.ClusterConditionReady)
	o.health = o.health.extend(observed.Status == metav1.ConditionTrue, now)
	ready := applyThresholds(oldReady, observed, o.health, now, thresholds{o.opts.SuccessThreshold, o.opts.FailureThreshold})
	setCondition(&status.Conditions, ready, now)
	if observed.Status != metav1.ConditionTrue {
		o.counters.resetFailures()
		return status
	}
	if oldReady == nil || oldReady.Status != metav1.ConditionTrue || len(old.APIEnablements) == 0 || old.KubernetesVersion == "" ||
		now.Sub(o.discoveredAt) >= discoveryInterval {
		o.discover(ctx, &status)
	}
	staleReasons := o.summarize(ctx, &status, models)
	if ctx.Err() != nil {
		return old
	}
	if len(staleReasons) > 0 && ready.Status == metav1.ConditionTrue {
		ready.Message += "; " + strings.Join(staleReasons, "; ")
		setCondition(&status.Conditions, ready, now)
	}
	return status
}

// Failures returns the number of consecutive unhealthy results, 0 if the last result was healthy.
func (o *Observer) Failures() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.health.healthy {
		return 0
	}
	return o.health.count
}

// discover reads the version and the APIs of the cluster into status, and sets the condition CompleteAPIEnablements.
func (o *Observer) discover(ctx context.Context, status *clusterv1alpha1.ClusterStatus) {
	now := o.opts.Clock.Now()
	if version := o.readVersion(ctx); version != "" {
		status.KubernetesVersion = version
	}
	list, err := o.listAPIs()
	merged, unavailable := mergeAPIs(status.APIEnablements, o.unavailableAPIs, discoveryResult{list, err})
	if limitErr := checkFitsStatus(merged); limitErr != nil {
		err = limitErr
	} else {
		status.APIEnablements, o.unavailableAPIs = merged, unavailable
	}
	setCondition(&status.Conditions, completenessCondition(list, err), now)
	o.discoveredAt = now
}

// summarize writes the counters of nodes and pods into status, and returns the reasons why some are stale. The first
// call waits for the counters.
func (o *Observer) summarize(ctx context.Context, status *clusterv1alpha1.ClusterStatus, models []clusterv1alpha1.ResourceModel) (staleReasons []string) {
	if !o.hasWaitedForSync {
		o.hasWaitedForSync = true
		o.counters.waitForSync(ctx, syncTimeout)
	}
	return o.counters.writeSummaries(status, models, o.opts.Clock.Now())
}

// setCondition is meta.SetStatusCondition with the time of the Observer's clock: now becomes the transition time of a
// condition that is new or changes its status.
func setCondition(conditions *[]metav1.Condition, condition metav1.Condition, now time.Time) {
	condition.LastTransitionTime = metav1.NewTime(now)
	meta.SetStatusCondition(conditions, condition)
}
