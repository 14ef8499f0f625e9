package agent

import (
	"cmp"
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/check"
)

const (
	// checksInterval is the time between two looks at the checks of the cluster object: that of the Sveltos surface.
	checksInterval = time.Minute
	// checksLimit is how long all of them may take.
	checksLimit = 30 * time.Second
	// checksThreshold is how often in a row a check fails until the cluster counts as Down, unless the cluster object says
	// otherwise. No more than that is counted, so that nothing is written about a cluster that stays as it is.
	checksThreshold = 3
)

// verdict is what the checks of the cluster object say of the member. Without any it is ready.
type verdict struct {
	// known is false until the cluster object was seen and its checks were run.
	known    bool
	ready    bool
	failures int32
	message  string
}

// checks runs the readiness and liveness checks of the cluster object, on the member that they are about.
type checks struct {
	member *rest.Config
	clock  clock.Clock
	// asked holds one request to run them now.
	asked chan struct{}
	// changed is called when there is another verdict.
	changed func()

	// mu guards what follows.
	mu      sync.Mutex
	seen    bool
	spec    libv1beta1.SveltosClusterSpec
	ready   bool
	verdict verdict
	// version counts the changes of what is asked: a verdict on something else is dropped.
	version int
}

func newChecks(member *rest.Config, clock clock.Clock, changed func()) *checks {
	return &checks{member: member, clock: clock, asked: make(chan struct{}, 1), changed: changed}
}

// take takes the checks from the cluster object as it is now. They are run at once if they changed, or if others of
// them count now.
func (c *checks) take(cluster *libv1beta1.SveltosCluster) {
	spec := libv1beta1.SveltosClusterSpec{
		ReadinessChecks: cluster.Spec.ReadinessChecks, LivenessChecks: cluster.Spec.LivenessChecks,
		ConsecutiveFailureThreshold: cluster.Spec.ConsecutiveFailureThreshold,
	}
	c.mu.Lock()
	news := !c.seen || c.ready != cluster.Status.Ready || !equality.Semantic.DeepEqual(c.spec, spec)
	if !c.seen {
		// A new process goes on counting where the one before it ended.
		c.verdict.failures = cluster.Status.AgentCheckFailures
	}
	if news {
		c.version++
		c.seen, c.spec, c.ready = true, *spec.DeepCopy(), cluster.Status.Ready
		// Nothing is said of a cluster that is not ready, or not ready any more since it was made anew, before these checks
		// were run.
		c.verdict.known = c.verdict.known && c.ready
	}
	c.mu.Unlock()
	if news {
		session.Signal(c.asked)
	}
}

// run runs the checks when asked to, and each minute while there are any, until ctx ends.
func (c *checks) run(ctx context.Context) {
	for {
		timer := c.clock.NewTimer(checksInterval)
		select {
		case <-timer.C():
			if !c.any() {
				continue
			}
		case <-c.asked:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
			return
		}
		c.look(ctx)
	}
}

func (c *checks) any() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.spec.ReadinessChecks)+len(c.spec.LivenessChecks) > 0
}

// look runs the checks once.
func (c *checks) look(ctx context.Context) {
	c.mu.Lock()
	spec, ready, version := c.spec, c.ready, c.version
	c.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, checksLimit)
	defer cancel()
	answer := c.ask(limited, &spec, ready)
	if ctx.Err() != nil {
		return
	}
	c.mu.Lock()
	if c.version != version {
		// It was asked for again.
		c.mu.Unlock()
		return
	}
	before := c.verdict
	c.verdict = before.next(answer, spec.ConsecutiveFailureThreshold)
	now := c.verdict
	c.mu.Unlock()
	if now.message != before.message {
		log.FromContext(ctx).Info("the checks of the cluster say something else", "failure", now.message)
	}
	if now != before {
		c.changed()
	}
}

func (c *checks) ask(ctx context.Context, spec *libv1beta1.SveltosClusterSpec, ready bool) check.Result {
	if len(spec.ReadinessChecks)+len(spec.LivenessChecks) == 0 {
		return check.Result{Ready: true}
	}
	// It asks for the kinds that the checks name, as they are served now, and keeps nothing.
	member, err := client.New(c.member, client.Options{})
	if err != nil {
		return check.Result{Ready: ready, Failure: err.Error()}
	}
	return check.EvaluateCluster(ctx, member, spec, ready)
}

// next returns the verdict after answer. Failures are counted up to threshold.
func (v verdict) next(answer check.Result, threshold int32) verdict {
	if answer.Failure == "" {
		return verdict{known: true, ready: true}
	}
	return verdict{
		known: true, ready: answer.Ready, message: answer.Failure,
		failures: max(1, min(v.failures+1, cmp.Or(threshold, checksThreshold))),
	}
}

// known returns the latest verdict.
func (c *checks) known() verdict {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.verdict
}

// status is what the report on the cluster object says of the verdict. It never says that a cluster is not ready any
// more. failureMessage is the hub's, which makes it from this and from what it knows itself.
func (v verdict) status() map[string]any {
	status := map[string]any{"agentCheckFailures": nil, "agentCheckMessage": nil}
	if v.ready {
		status["ready"] = true
	}
	if v.message != "" {
		status["agentCheckFailures"], status["agentCheckMessage"] = v.failures, v.message
	}
	return status
}

// agrees says whether the cluster object says what the verdict is.
func (v verdict) agrees(status libv1beta1.SveltosClusterStatus) bool {
	return (status.Ready || !v.ready) && status.AgentCheckFailures == v.failures && status.AgentCheckMessage == v.message
}
