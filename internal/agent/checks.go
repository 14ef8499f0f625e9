package agent

import (
	"cmp"
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/check"
)

const (
	// checksInterval is the time between two runs of the checks, as in Sveltos.
	checksInterval = time.Minute
	// checksTimeout limits one run of all checks.
	checksTimeout = 30 * time.Second
	// checksThreshold is the default number of failures in a row after which the cluster counts as Down. The count stops
	// at the threshold, so that an unchanged failure is not reported again.
	checksThreshold = 3
)

// checksState is the state of the member according to the checks. Without checks the member is ready.
type checksState struct {
	// isKnown is false until the checks have run. isReady is true if the readiness checks have passed.
	isKnown bool
	isReady bool
	// failures is the number of failed runs in a row, and message describes the last failure.
	failures int32
	message  string
}

// checks runs the readiness and liveness checks of the SveltosCluster on the member.
type checks struct {
	member  *rest.Config
	clock   clock.Clock
	checker check.Checker
	// runRequested holds one signal to run the checks now.
	runRequested chan struct{}
	// onChange is called when the state changes.
	onChange func()

	// mu guards the fields below.
	mu sync.Mutex
	// hasCluster is true after the first setCluster. spec has only the checks and their threshold, and reportedReady is
	// status.ready of the SveltosCluster.
	hasCluster    bool
	spec          libv1beta1.SveltosClusterSpec
	reportedReady bool
	state         checksState
	// generation counts the changes of spec and reportedReady. The result of a run that began with an older generation is
	// dropped.
	generation int
}

func newChecks(member *rest.Config, checker check.Checker, clock clock.Clock, onChange func()) *checks {
	return &checks{member: member, checker: checker, clock: clock, runRequested: make(chan struct{}, 1), onChange: onChange}
}

// setCluster sets the SveltosCluster that has the checks. It requests a run if the checks or status.ready have changed.
// The readiness checks run only while status.ready is false.
func (c *checks) setCluster(cluster *libv1beta1.SveltosCluster) {
	spec := libv1beta1.SveltosClusterSpec{
		ReadinessChecks: cluster.Spec.ReadinessChecks, LivenessChecks: cluster.Spec.LivenessChecks,
		ConsecutiveFailureThreshold: cluster.Spec.ConsecutiveFailureThreshold,
	}
	c.mu.Lock()
	changed := !c.hasCluster || c.reportedReady != cluster.Status.Ready || !equality.Semantic.DeepEqual(c.spec, spec)
	if !c.hasCluster {
		// A new process continues the count of the previous one.
		c.state.failures = cluster.Status.AgentCheckFailures
	}
	if changed {
		c.generation++
		c.hasCluster, c.spec, c.reportedReady = true, *spec.DeepCopy(), cluster.Status.Ready
		// If status.ready is false, for example because the SveltosCluster was created again, the state is unknown until
		// the readiness checks have run: reportStatus must not set it to true before.
		c.state.isKnown = c.state.isKnown && c.reportedReady
	}
	c.mu.Unlock()
	if changed {
		session.Signal(c.runRequested)
	}
}

// run runs the checks on request, and after each interval while there are checks, until ctx ends.
func (c *checks) run(ctx context.Context) {
	for {
		timer := c.clock.NewTimer(checksInterval)
		select {
		case <-timer.C():
			if !c.hasChecks() {
				continue
			}
		case <-c.runRequested:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
			return
		}
		c.runOnce(ctx)
	}
}

func (c *checks) hasChecks() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.spec.ReadinessChecks)+len(c.spec.LivenessChecks) > 0
}

func (c *checks) runOnce(ctx context.Context) {
	c.mu.Lock()
	spec, isReady, generation := c.spec, c.reportedReady, c.generation
	c.mu.Unlock()
	runCtx, cancel := context.WithTimeout(ctx, checksTimeout)
	defer cancel()
	result, err := c.evaluate(runCtx, &spec, isReady)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		log.FromContext(ctx).Error(err, "cannot run the cluster's checks; their last result stays")
		return
	}
	c.mu.Lock()
	if c.generation != generation {
		// Another run was requested.
		c.mu.Unlock()
		return
	}
	previous := c.state
	c.state = previous.nextState(result, spec.ConsecutiveFailureThreshold)
	state := c.state
	c.mu.Unlock()
	if state.message != previous.message {
		log.FromContext(ctx).Info("the result of the cluster's checks has changed", "failure", state.message)
	}
	if state != previous {
		c.onChange()
	}
}

// evaluate runs the liveness checks, and before them the readiness checks if isReady is false.
func (c *checks) evaluate(ctx context.Context, spec *libv1beta1.SveltosClusterSpec, isReady bool) (check.Result, error) {
	if len(spec.ReadinessChecks)+len(spec.LivenessChecks) == 0 {
		return check.Result{Ready: true}, nil
	}
	member, err := check.NewReader(c.member)
	if err != nil {
		return check.Result{Ready: isReady, Failure: err.Error()}, nil //nolint:nilerr // the cluster fails its checks then
	}
	return c.checker.EvaluateCluster(ctx, member, spec, isReady)
}

// nextState returns the state after a run with this result. Without a failure, Result.Ready is true. The number of
// failures is between 1 and threshold; zero means checksThreshold.
func (s checksState) nextState(result check.Result, threshold int32) checksState {
	if result.Failure == "" {
		return checksState{isKnown: true, isReady: true}
	}
	return checksState{
		isKnown: true, isReady: result.Ready, message: result.Failure,
		failures: max(1, min(s.failures+1, cmp.Or(threshold, checksThreshold))),
	}
}

// latest returns the current state.
func (c *checks) latest() checksState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// statusFields returns the fields of the SveltosCluster's status for this state. They never set ready to false. The hub
// computes failureMessage from them and from its own checks.
func (s checksState) statusFields() map[string]any {
	status := map[string]any{"agentCheckFailures": nil, "agentCheckMessage": nil}
	if s.isReady {
		status["ready"] = true
	}
	if s.message != "" {
		status["agentCheckFailures"], status["agentCheckMessage"] = s.failures, s.message
	}
	return status
}

// isReported returns true if status has this state.
func (s checksState) isReported(status libv1beta1.SveltosClusterStatus) bool {
	return (status.Ready || !s.isReady) && status.AgentCheckFailures == s.failures && status.AgentCheckMessage == s.message
}
